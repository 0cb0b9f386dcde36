"""Prefix keys against a big-integer reference, and what they must not depend on."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_compile.errors import GuidanceError
from trace_compile.state.prefix import PrefixState, positions_from_cu_seqlens, prefix_keys

U64 = (1 << 64) - 1


def mix(x: int) -> int:
    x &= U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


def reference(ids: list[int], trajectory: int | None = None) -> list[int]:
    """Keys of one sequence with Python integers, as signed 64-bit."""
    total = 0 if trajectory is None else mix(trajectory + 0xD1B54A32D192ED03)
    keys = []
    for j, token in enumerate(ids):
        total += mix(mix(token) + 0x9E3779B97F4A7C15 * (j + 1))
        key = mix(total)
        keys.append(key - (1 << 64) if key >> 63 else key)
    return keys


def keys_of(ids: list[int], trajectory: int | None = None) -> list[int]:
    named = None if trajectory is None else torch.tensor([trajectory])
    return prefix_keys(torch.tensor([ids], dtype=torch.int64), trajectory_ids=named)[0][0].tolist()


def test_splitmix64_known_values():
    """The published generator: seed 1234567, first outputs."""
    state, out = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & U64
        out.append(mix(state))
    assert out == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.none() | st.integers(0, 2**40))
def test_exact_values(ids, trajectory):
    assert keys_of(ids, trajectory) == reference(ids, trajectory)


def test_padding_on_either_side_changes_nothing():
    sequences = [[5, 6, 7, 8], [5, 6], [9], []]
    for side in ("left", "right"):
        rows, masks = [], []
        for seq in sequences:
            pad = [77] * (6 - len(seq))
            rows.append(pad + seq if side == "left" else seq + pad)
            masks.append([0] * len(pad) + [1] * len(seq) if side == "left" else [1] * len(seq) + [0] * len(pad))
        mask = torch.tensor(masks)
        for typed in (mask, mask.bool(), mask.float()):
            keys, valid, state = prefix_keys(torch.tensor(rows), typed)
            assert torch.equal(valid, mask.bool())
            assert [k[m].tolist() for k, m in zip(keys, valid)] == [reference(s) for s in sequences]
            assert not keys[~valid].any()
            assert state.count.tolist() == [4, 2, 1, 0]


def test_position_ids_of_padded_batches_change_nothing():
    """transformers derives position ids from the mask and puts 0 or 1 under the padding."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[0, 0, 3, 4, 5], [3, 4, 5, 6, 7]])
    expected = prefix_keys(ids, mask)[0]
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        assert torch.equal(prefix_keys(ids, mask, positions)[0], expected)
    right = torch.tensor([[1, 1, 1, 0, 0]])
    assert torch.equal(
        prefix_keys(torch.tensor([[3, 4, 5, 0, 0]]), right, torch.tensor([0, 1, 2, 0, 1]))[0][:, :3], expected[:1, 2:]
    )


def test_packing_restarts():
    sequences = [[1, 2, 3], [4], [1, 2], [4], [1, 2, 3, 9]]
    flat = torch.tensor([list(chain(*sequences))])
    positions = torch.tensor([list(chain(*(range(len(s)) for s in sequences)))])
    expected = list(chain(*map(reference, sequences)))
    assert prefix_keys(flat, position_ids=positions)[0][0].tolist() == expected
    assert prefix_keys(flat, position_ids=positions[0])[0][0].tolist() == expected
    bounds = torch.tensor([0, 3, 4, 6, 7, 11], dtype=torch.int32)
    assert torch.equal(positions_from_cu_seqlens(bounds, 11), positions)
    # Two rows packed differently, with padding at the end and in between.
    ids = torch.tensor([[1, 2, 3, 4, 0, 0], [7, 0, 1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3]])
    keys, valid, _ = prefix_keys(ids, mask, positions)
    assert keys[0][valid[0]].tolist() == reference([1, 2]) + reference([3, 4])
    assert keys[1][valid[1]].tolist() == reference([7]) + reference([1, 2, 3, 4])


def test_padding_between_tokens_does_not_restart():
    ids, mask = torch.tensor([[5, 0, 0, 6]]), torch.tensor([[1, 0, 0, 1]])
    keys, _, state = prefix_keys(ids, mask, torch.tensor([[0, 0, 1, 1]]))
    assert keys[0, [0, 3]].tolist() == reference([5, 6])
    assert (state.count.item(), state.position.item()) == (2, 1)


def test_packed_sequences_of_one_token():
    ids, positions = torch.tensor([[5, 5, 6]]), torch.zeros(1, 3, dtype=torch.int64)
    assert prefix_keys(ids, position_ids=positions)[0][0].tolist() == reference([5]) * 2 + reference([6])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_incremental_decoding_equals_one_shot(data):
    batch, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    ids = torch.tensor([[rng.randrange(50) for _ in range(length)] for _ in range(batch)])
    mask = torch.tensor([[rng.random() < 0.7 for _ in range(length)] for _ in range(batch)])
    positions = torch.tensor([sorted(rng.randrange(20) for _ in range(length)) for _ in range(batch)])
    positions = torch.where(torch.rand(batch, length) < 0.2, 0, positions)
    trajectories = torch.arange(batch) + 7
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    for position_ids in (None, positions):
        whole, valid, end = prefix_keys(ids, mask, position_ids, trajectories)
        pieces, state = [], None
        for begin, stop in zip([0, *cuts], [*cuts, length]):
            part = slice(begin, stop)
            wide = mask[:, :stop] if state is not None and rng.random() < 0.5 else mask[:, part]
            position = None if position_ids is None else position_ids[:, part]
            keys, v, state = prefix_keys(ids[:, part], wide, position, trajectories, start=state)
            assert torch.equal(v, valid[:, part])
            pieces.append(keys)
        assert torch.equal(torch.cat(pieces, 1), whole)
        assert state is not None
        assert torch.equal(state.total, end.total) and torch.equal(state.count, end.count)
        assert torch.equal(state.position, end.position)


def test_prefill_without_and_decode_with_position_ids():
    """Left-padded prefill, then one token at a time as generate() feeds them."""
    ids, mask = torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    _, _, state = prefix_keys(ids, mask)
    for step, token in enumerate((8, 9)):
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), 1)
        position = mask.sum(1, keepdim=True) - 1
        keys, valid, state = prefix_keys(torch.full((2, 1), token), mask, position, start=state)
        suffix = [8, 9][: step + 1]
        assert keys[:, 0].tolist() == [reference([3, 4, *suffix])[-1], reference([3, 4, 5, 6, *suffix])[-1]]
        assert valid.all()


def test_trajectories_join_the_key():
    ids = torch.tensor([[1, 2, 3], [1, 2, 3]])
    plain = prefix_keys(ids)[0]
    named = prefix_keys(ids, trajectory_ids=torch.tensor([0, 1]))[0]
    assert torch.equal(plain[0], plain[1])
    assert len({*plain[0].tolist(), *named.flatten().tolist()}) == 9
    # Packed rows name the trajectory per token.
    packed = prefix_keys(
        torch.tensor([[1, 2, 3, 1, 2, 3]]),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]),
        trajectory_ids=torch.tensor([[0, 0, 0, 1, 1, 1]]),
    )[0]
    assert torch.equal(packed.reshape(2, 3), named)


def thue_morse(n: int, flip: int = 0) -> list[int]:
    return [(bin(i).count("1") + flip) & 1 for i in range(n)]


def test_near_misses_differ():
    base = [4, 8, 15, 16, 23, 42]
    variants = [
        base,
        [8, 4, *base[2:]],
        base[::-1],
        [*base[:3], 17, *base[4:]],
        [*base, 0],
        [0, *base],
        base[:-1],
        base * 2,
        [-1, *base[1:]],
        [4 + 2**32, *base[1:]],
        [0] * 6,
        [0] * 7,
    ]
    # Polynomial rolling hashes modulo 2^64 collide on the Thue-Morse word and its complement, whatever their base.
    for n in (1 << 10, 1 << 11):
        variants += [thue_morse(n), thue_morse(n, 1)]
    finals = [keys_of(v)[-1] for v in variants]
    assert len(set(finals)) == len(finals)


def test_a_million_prefixes_do_not_collide():
    """The chance of one collision among 1e6 ideal 64-bit keys is 3e-8; small vocabulary makes structure visible."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (1000, 1000), generator=generator)
    keys = prefix_keys(ids)[0]
    distinct = {tuple(row[:n].tolist()) for row in ids for n in range(1, 18)}  # shared short prefixes
    short = keys[:, :17].flatten().unique().numel()
    assert short == len(distinct)
    assert keys[:, 17:].flatten().unique().numel() + short == keys.unique().numel()
    rows = ids[:, :18].unique(dim=0).shape[0]
    assert keys[:, 17].unique().numel() == rows
    # From column 40 on all rows of this seed are different, so all their keys must be.
    assert ids[:, :40].unique(dim=0).shape[0] == 1000
    assert keys[:, 39:].unique().numel() == 1000 * 961
    single = prefix_keys(torch.arange(1_000_000)[:, None])[0]
    assert single.unique().numel() == 1_000_000


def test_keys_spread_over_all_bits():
    keys = prefix_keys(torch.arange(4096)[None])[0][0]
    ones = ((keys[:, None] >> torch.arange(64)) & 1).double().mean(0)
    assert (ones - 0.5).abs().max() < 0.05  # six standard deviations of 4096 fair bits


def test_empty_calls():
    keys, valid, state = prefix_keys(torch.zeros(2, 0, dtype=torch.int64))
    assert keys.shape == valid.shape == (2, 0) and state.count.tolist() == [0, 0]
    assert torch.equal(
        prefix_keys(torch.tensor([[3], [4]]), start=state)[0][:, 0],
        torch.tensor([reference([3])[0], reference([4])[0]]),
    )
    keys, _, _ = prefix_keys(torch.zeros(0, 5, dtype=torch.int32))
    assert keys.shape == (0, 5)


def test_inputs_that_cannot_be_keyed_are_refused():
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(GuidanceError, match="must be integers"):
        prefix_keys(torch.zeros(1, 3, 8))
    with pytest.raises(GuidanceError, match="prefix state of the tokens before"):
        prefix_keys(ids, torch.ones(1, 5))
    with pytest.raises(GuidanceError, match=r"attention_mask \(1, 1, 3, 3\)"):
        prefix_keys(ids, torch.ones(1, 1, 3, 3))
    with pytest.raises(GuidanceError, match=r"position_ids \(3, 1, 3\)"):
        prefix_keys(ids, position_ids=torch.zeros(3, 1, 3))
    with pytest.raises(GuidanceError, match=r"trajectory_ids \(2,\)"):
        prefix_keys(ids, trajectory_ids=torch.zeros(2))
    zero = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(GuidanceError, match="prefix state"):
        prefix_keys(ids, start=PrefixState(zero, zero, zero))


def test_nothing_is_read_back_to_the_host():
    """Fake tensors have no data: any `.item()`, boolean indexing or branch on values would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.ones(2, 7, dtype=torch.int64)
        keys, valid, state = prefix_keys(ids, ids, ids, ids[:, 0])
        keys, valid, _ = prefix_keys(ids, ids.repeat(1, 2), ids, start=state)
        assert positions_from_cu_seqlens(ids[0, :3], 9).shape == (1, 9)
    assert keys.shape == valid.shape == (2, 7)


@pytest.mark.gpu
def test_cuda_gives_the_same_keys_without_a_synchronisation():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50000, (8, 300), generator=generator)
    mask = torch.rand(8, 300, generator=generator) < 0.8
    positions = torch.arange(300).remainder(70).expand(8, 300)
    trajectories = torch.arange(8)
    expected = prefix_keys(ids, mask, positions, trajectories)
    ids, mask, positions, trajectories = (x.cuda() for x in (ids, mask, positions, trajectories))
    prefix_keys(ids, mask, positions, trajectories)
    torch.cuda.set_sync_debug_mode("error")
    try:
        keys, valid, state = prefix_keys(ids, mask, positions, trajectories)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(keys.cpu(), expected[0]) and torch.equal(valid.cpu(), expected[1])
    assert torch.equal(state.total.cpu(), expected[2].total)
