"""AdamW on float32 masters, for parameters of any dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW on float32 masters of the parameters (the parameters themselves where those are float32 already).

    Steps of a bfloat16 parameter at a learning rate of 1e-5 would be lost in rounding. Gradient norm is clipped to 1.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        learning_rate: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        self._parameters = parameters
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in parameters]
        self._adamw = torch.optim.AdamW(self.masters, lr=learning_rate, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, learning_rate: float | None = None) -> None:
        """One update of masters and parameters, at another learning rate from now on if given; clears the gradients."""
        if learning_rate is not None:
            self._adamw.param_groups[0]["lr"] = learning_rate
        for parameter, master in zip(self._parameters, self.masters):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._adamw.step()
        for parameter, master in zip(self._parameters, self.masters):
            if master is not parameter:
                parameter.copy_(master)
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters and moments, to go on from later; the tensors are the optimizer's own."""
        found = {f"master.{i}": master for i, master in enumerate(self.masters)}
        for i, master in enumerate(self.masters):
            found |= {f"{key}.{i}": value for key, value in self._adamw.state[master].items()}
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``: masters, moments, and the parameters as rounded masters."""
        for i, (parameter, master) in enumerate(zip(self._parameters, self.masters)):
            master.copy_(state[f"master.{i}"])
            if master is not parameter:
                parameter.copy_(master)
            moments = {key: state[f"{key}.{i}"] for key in _ADAMW_STATE if f"{key}.{i}" in state}
            if moments:
                self._adamw.state[master] = {
                    key: value.clone() if key == "step" else value.to(master.device, copy=True)
                    for key, value in moments.items()
                }

    @torch.no_grad()
    def adopt(self) -> None:
        """Let the parameters be the float32 masters themselves: what training has really arrived at."""
        for parameter, master in zip(self._parameters, self.masters):
            parameter.data = master.data
