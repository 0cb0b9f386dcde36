"""Packed weights follow their masters, at fixed addresses, all or nothing."""

from __future__ import annotations

import gc

import pytest
import torch

from trace_compile.errors import BlockSizeError, NonFiniteWeightError, RefitError
from trace_compile.ops.scheme import OperandScheme
from trace_compile.ops.weights import Packed, WeightLayout, pack_experts
from trace_compile.state import packed as module
from trace_compile.state.packed import PackedWeights

PLAIN, TRANSPOSED = WeightLayout(), WeightLayout(transposed=True, interleaved=True)
EXPERT, TENSOR = OperandScheme(outer="expert"), OperandScheme(outer="tensor")


def weight(seed: int = 0, shape=(4, 32, 64), dtype=torch.float32) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(values.to(dtype))


def same(packed: Packed, param: torch.Tensor, layout=PLAIN, scheme=EXPERT) -> bool:
    fresh = pack_experts(param, layout, scheme)
    return all(torch.equal(getattr(packed, f), getattr(fresh, f)) for f in ("codes", "scales", "outer"))


def addresses(packed: Packed) -> list[int]:
    return [t.data_ptr() for t in (packed.codes, packed.scales, packed.outer)]


def snapshot(packed: Packed) -> Packed:
    return Packed(packed.codes.clone(), packed.scales.clone(), packed.outer.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [PLAIN, TRANSPOSED])
def test_packs_once_until_the_parameter_changes(dtype, layout):
    cache, param = PackedWeights(), weight(dtype=dtype)
    first = cache.get("w", param, layout, EXPERT)
    assert same(first, param, layout)
    assert cache.get("w", param, layout, EXPERT) is first and cache.pack_count == 1
    assert cache.get("w", param.detach(), layout, EXPERT) is first and cache.pack_count == 1
    where = addresses(first)
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5).step()
    assert not same(first, param, layout)
    second = cache.get("w", param, layout, EXPERT)
    assert same(second, param, layout) and addresses(second) == where and cache.pack_count == 2


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_every_optimizer_step_is_seen(optimizer, options):
    """Fused optimizers among them, which leave the version counter alone."""
    cache, param = PackedWeights(), weight()
    step = getattr(torch.optim, optimizer)([param], lr=0.1, **options)
    for count in range(1, 4):
        assert same(cache.get("w", param, PLAIN, EXPERT), param) and cache.pack_count == count
        param.grad = torch.full_like(param, float(count))
        step.step()


def test_replaced_storage_is_seen():
    cache, param = PackedWeights(), weight()
    where = addresses(cache.get("w", param, PLAIN, EXPERT))
    version = param._version
    param.data = weight(1).data
    assert param._version == version
    replaced = cache.get("w", param, PLAIN, EXPERT)
    assert same(replaced, param) and addresses(replaced) == where
    other = weight(2)
    assert same(cache.get("w", other, PLAIN, EXPERT), other)
    with torch.no_grad():
        other.copy_(weight(3))
    assert same(cache.get("w", other, PLAIN, EXPERT), other)


def test_a_new_parameter_at_the_address_of_a_freed_one_is_seen():
    cache = PackedWeights()
    buffer = bytearray(4 * 32 * 64 * 4)  # memory that two storages have one after the other

    def born(seed: int) -> torch.Tensor:
        param = torch.frombuffer(buffer, dtype=torch.float32).reshape(4, 32, 64)
        memory = torch.frombuffer(buffer, dtype=torch.float32)
        memory.copy_(weight(seed).detach().flatten())
        return param

    old = born(0)
    address, version = old.data_ptr(), old._version
    cache.get("w", old, PLAIN, EXPERT)
    del old
    gc.collect()
    new = born(1)
    assert (new.data_ptr(), new._version) == (address, version)
    assert same(cache.get("w", new, PLAIN, EXPERT), new)


def test_hidden_writes_need_a_refresh():
    cache = PackedWeights()
    a, b = weight(0), weight(1)
    first, other = cache.get("a", a, PLAIN, EXPERT), cache.get("b", b, PLAIN, EXPERT)
    a.data.mul_(-3)
    b.data.mul_(-3)
    assert not same(cache.get("a", a, PLAIN, EXPERT), a)  # the documented limit
    where = addresses(first)
    cache.refresh(["a"])
    assert same(cache.get("a", a, PLAIN, EXPERT), a) and addresses(cache.get("a", a, PLAIN, EXPERT)) == where
    assert not same(cache.get("b", b, PLAIN, EXPERT), b)
    cache.refresh()
    assert same(cache.get("b", b, PLAIN, EXPERT), b) and cache.get("b", b, PLAIN, EXPERT) is other
    count = cache.pack_count
    cache.get("b", b, PLAIN, EXPERT)
    assert cache.pack_count == count
    with pytest.raises(RefitError, match=r"\['c'\]; there are \['a', 'b'\]"):
        cache.refresh(["c"])


def test_layouts_and_schemes_have_entries_of_their_own():
    cache, param = PackedWeights(), weight(shape=(4, 64, 64))
    entries = [cache.get("w", param, layout, scheme) for layout in (PLAIN, TRANSPOSED) for scheme in (EXPERT, TENSOR)]
    assert len(cache) == len({id(e) for e in entries}) == 4
    assert same(entries[2], param, TRANSPOSED, EXPERT) and same(entries[1], param, PLAIN, TENSOR)
    assert cache.names == {"w"}


def test_a_shape_change_makes_a_new_entry():
    cache = PackedWeights()
    cache.get("w", weight(), PLAIN, EXPERT)
    wider = weight(shape=(4, 32, 128))
    assert same(cache.get("w", wider, PLAIN, EXPERT), wider) and len(cache) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_is_refused_by_name_and_the_old_one_stays(bad):
    cache, param = PackedWeights(), weight()
    packed = cache.get("layers.3.w13", param, PLAIN, EXPERT)
    before = snapshot(packed)
    with torch.no_grad():
        param[3, 31, 63] = bad
    for _ in range(2):  # the failure is not remembered as success
        with pytest.raises(NonFiniteWeightError, match=r"layers\.3\.w13"):
            cache.get("layers.3.w13", param, PLAIN, EXPERT)
    assert torch.equal(packed.codes, before.codes) and torch.equal(packed.outer, before.outer)
    with torch.no_grad():
        param[3, 31, 63] = 1.0
    assert same(cache.get("layers.3.w13", param, PLAIN, EXPERT), param)
    with pytest.raises(BlockSizeError, match="odd"):
        cache.get("odd", weight(shape=(2, 32, 40)), PLAIN, EXPERT)
    assert cache.names == {"layers.3.w13"}


def three(cache: PackedWeights) -> tuple[dict[str, torch.nn.Parameter], list[Packed]]:
    params = {f"w{i}": weight(i) for i in range(3)}
    return params, [cache.get(name, param, PLAIN, EXPERT) for name, param in params.items()]


def test_update_all_replaces_everything_in_place():
    cache = PackedWeights()
    params, entries = three(cache)
    where = [addresses(e) for e in entries]
    also = cache.get("w1", params["w1"], TRANSPOSED, TENSOR)
    new = {name: weight(10 + i) for i, name in enumerate(params)}
    cache.update_all(new)
    assert all(same(e, p) for e, p in zip(entries, new.values())) and same(also, new["w1"], TRANSPOSED, TENSOR)
    assert [addresses(e) for e in entries] == where
    count = cache.pack_count
    cache.update_all(new)  # nothing changed since
    assert cache.pack_count == count and cache.get("w0", new["w0"], PLAIN, EXPERT) is entries[0]
    new["w2"].data.neg_()
    cache.update_all(new)
    assert not same(entries[2], new["w2"])
    cache.update_all(new, force=True)
    assert same(entries[2], new["w2"]) and cache.pack_count == count + 4


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_update_all_changes_nothing_if_one_weight_is_bad(broken):
    cache = PackedWeights()
    params, entries = three(cache)
    before = [snapshot(e) for e in entries]
    new = {name: weight(10 + i) for i, name in enumerate(params)}
    with torch.no_grad():
        new[f"w{broken}"][2, 3, 4] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=f"w{broken}: expert 2"):
        cache.update_all(new)
    reshaped = {**new, f"w{broken}": weight(shape=(4, 32, 80))}
    with pytest.raises(RefitError, match=rf"w{broken} was packed from \[4, 32, 64\] and is now \[4, 32, 80\]"):
        cache.update_all(reshaped)
    for entry, old, param in zip(entries, before, params.values()):
        assert torch.equal(entry.codes, old.codes) and torch.equal(entry.scales, old.scales) and same(entry, param)
    # And the cache does not believe that the new weights are in it.
    with torch.no_grad():
        new[f"w{broken}"][2, 3, 4] = 0.0
    cache.update_all(new)
    assert all(same(e, p) for e, p in zip(entries, new.values()))


def test_update_all_needs_exactly_the_names():
    cache = PackedWeights()
    params, entries = three(cache)
    new = {name: weight(10 + i) for i, name in enumerate(params)}
    with pytest.raises(RefitError, match=r"lacks \['w1'\]"):
        cache.update_all({name: p for name, p in new.items() if name != "w1"})
    with pytest.raises(RefitError, match=r"named \['w9'\]"):
        cache.update_all({**new, "w9": weight()})
    assert all(same(e, p) for e, p in zip(entries, params.values()))


def test_update_all_stages_before_it_copies(monkeypatch):
    cache = PackedWeights()
    params, entries = three(cache)
    before = [snapshot(e) for e in entries]
    calls = []

    def run_out(param, layout, scheme, *, name):
        calls.append(name)
        if len(calls) == 3:
            raise MemoryError
        return pack_experts(param, layout, scheme, name=name)

    monkeypatch.setattr(cache, "_pack_experts", run_out)
    with pytest.raises(MemoryError):
        cache.update_all({name: weight(10 + i) for i, name in enumerate(params)})
    assert len(calls) == 3
    assert all(torch.equal(e.codes, b.codes) and torch.equal(e.outer, b.outer) for e, b in zip(entries, before))


def test_memory_is_that_of_four_bits():
    cache = PackedWeights()
    for name, shape in (("w13", (8, 64, 64)), ("w2", (8, 64, 32)), ("odd", (6, 96, 80))):
        cache.get(name, weight(shape=shape), PLAIN, EXPERT)
    weights = 8 * 64 * 64 + 8 * 64 * 32 + 6 * 96 * 80
    outers = 4 * (8 + 8 + 6)
    assert cache.nbytes == weights * 4.5 / 8 + outers
    assert 4.5 < cache.bits_per_weight <= 4.6
    assert PackedWeights().bits_per_weight == 0


def test_a_zero_block_row_or_expert_packs_to_finite_scales():
    """N01: no stored scale byte is a NaN, and the other blocks do not change."""
    holes = ((0, 0, slice(16, 32)), (1, 5), (2,))
    for amax in (1e-8, 0.01, 1.0, 1e4):
        base = weight().detach()
        base = base * (amax / float(base.abs().max()) / 2)
        base[:, -1, -1] = amax  # outside of all holes but the expert's
        full = pack_experts(base, PLAIN, EXPERT).dequantize()
        for hole in holes:
            param = base.clone()
            param[hole] = 0
            packed = PackedWeights().get("w", param, PLAIN, EXPERT)
            assert not ((packed.scales & 0x7F) == 0x7F).any() and (packed.scales > 0).all()
            assert torch.isfinite(packed.outer).all() and (packed.outer > 0).all()
            full_with_hole = full.clone()
            full_with_hole[hole] = 0
            assert torch.equal(packed.dequantize(), full_with_hole)


def test_entries_made_under_inference_mode_serve_training():
    cache, param = PackedWeights(), weight()
    with torch.inference_mode():
        packed = cache.get("w", param, PLAIN, EXPERT)
        assert same(packed, param)
    assert not packed.codes.is_inference()
    with torch.no_grad():
        param.neg_()
    with torch.inference_mode():
        cache.get("w", param, PLAIN, EXPERT)
    assert same(cache.get("w", param, PLAIN, EXPERT), param)
    assert not packed.outer.requires_grad
    with torch.inference_mode():
        unversioned = weight(5).detach().clone()
    assert same(cache.get("u", unversioned, PLAIN, EXPERT), unversioned)


def test_a_freed_parameter_is_not_kept_alive():
    cache, param = PackedWeights(), weight()
    cache.get("w", param, PLAIN, EXPERT)
    storage = module.StorageWeakRef(param.untyped_storage())
    del param
    gc.collect()
    assert storage.expired()


@pytest.mark.gpu
def test_masters_on_the_cpu_refit_weights_on_the_gpu():
    cache, param = PackedWeights(), weight().cuda()
    packed = cache.get("w", param, PLAIN, EXPERT)
    where = addresses(packed)
    new = weight(1)
    cache.update_all({"w": new})
    assert packed.codes.is_cuda and addresses(packed) == where
    assert torch.equal(packed.codes.cpu(), pack_experts(new, PLAIN, EXPERT).codes)


def test_an_entry_keeps_its_form_and_addresses():
    cache, params = PackedWeights(lambda *a, **k: pack_experts(*a, **k).quads), {"w": weight(shape=(3, 16, 128))}
    quads = cache.get("w", params["w"], PLAIN, EXPERT)
    before = addresses(quads)
    assert quads.quads is quads and cache.bits_per_weight < 4.6
    with torch.no_grad():
        params["w"].mul_(3.0)
    cache.update_all(params)
    assert addresses(quads) == before and same(quads.linear, params["w"])
    other = weight(5, shape=(3, 16, 128))
    cache.adopt({"w": pack_experts(other, PLAIN, EXPERT)})
    assert addresses(quads) == before and same(quads.linear, other)
