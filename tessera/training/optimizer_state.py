"""An optimizer's state, made as its first step would make it, its counters and its numbers.

Nothing of an optimizer is copied: every tensor a step reads or writes is the one in `optimizer.state`, looked up at
every call, so that `load_state_dict`, schedulers and `add_param_group` are seen. Counters are read once and followed
from then on (a counter on the GPU would make the host wait); one that somebody else wrote is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.optim import Rule, rule_of
from tessera.optim.updates import Extra, Family, Plan
from tessera.torch_internals.autograd import version_of
from tessera.torch_internals.modules import has_step_hooks, mark_stepped
from tessera.torch_internals.operators import foreach_add_
from tessera.training.methods import Method
from tessera.util.errors import InputError


class OptimizerState:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._rule = optimizer, rule_of(optimizer)
        self._step, self._zero_grad = Method(optimizer, "step"), Method(optimizer, "zero_grad")
        self._new: dict[torch.Tensor, torch.Tensor] = {}  # state that no step has used yet -> its parameter
        self._counted: dict[torch.Tensor, tuple[int, int]] = {}  # counter -> (its version, what it holds)
        self._sent: dict[tuple, tuple[list[float], torch.Tensor]] = {}  # the last numbers that went to a device

    # --- who carries out the step ---

    def own_step(self) -> str:
        """Why the optimizer must run its own `step`; empty where equations can stand for it."""
        if self._rule is None:
            return f"Tessera has no equations for the optimizer {type(self.optimizer).__name__}"
        if self._hooks():
            return "hooks are registered on the optimizer"
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            return "the optimizer's step is differentiable"
        return self._step.replaced()

    def own_zero_grad(self) -> str:
        """Why the optimizer's `zero_grad` must be called; empty where it only takes gradients away."""
        return self._zero_grad.replaced()

    def _hooks(self) -> bool:
        return has_step_hooks(self.optimizer)

    @property
    def rule(self) -> Rule:
        assert self._rule is not None, "an optimizer without a rule runs its own step"
        return self._rule

    def drop_grads(self) -> None:
        """As `zero_grad` does."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = None

    def groups(self) -> dict[torch.Tensor, int]:
        return {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    def forms(self) -> tuple:
        """What decides the equations of every group; a program made for other forms is not used."""
        return tuple(self.rule.form(group) for group in self.optimizer.param_groups)

    def told(self) -> list[str]:
        """The options of every group, as ranks compare them."""
        return [
            ", ".join(
                f"{name}={value.tolist() if isinstance(value, torch.Tensor) else value}"
                for name, value in group.items()
                if name not in ("params", "param_names")
            )
            for group in self.optimizer.param_groups
        ]

    # --- state ---

    def ensure(self, p: torch.Tensor, options: dict, names: tuple[str, ...]) -> bool:
        """Make the state the optimizer's own first step would make. True where no step has used it yet."""
        state = self.optimizer.state[p] if names else {}
        if self.rule.ages == "step" and "step" not in state:
            device = p.device if options.get("capturable") or options.get("fused") else torch.device("cpu")
            dtype = torch.get_default_dtype() if not options.get("fused") else torch.float32
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=device)
        for name in names:
            if state.get(name) is None:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self._new[state[name]] = p
        return bool(self._new) and any(state[name] in self._new for name in names)

    def give(self, p: torch.Tensor, name: str, new: torch.Tensor) -> None:
        """State that no step has used yet, made where somebody wants it to lie."""
        self.optimizer.state[p][name] = new
        self._new[new] = p

    def unmake(self) -> None:
        """Take back state that no step has used: the optimizer's own step wants to make it."""
        for p in self._new.values():
            self.optimizer.state.pop(p, None)
        self._new.clear()

    def ages(self, params: Sequence[torch.Tensor], groups: Sequence[int]) -> list[int]:
        """By what each parameter's numbers differ within its group, for the step that comes now."""
        options = self.optimizer.param_groups
        names = [self.rule.state(form) for form in self.forms()]
        fresh = [self.ensure(p, options[g], names[g]) for p, g in zip(params, groups, strict=True)]
        match self.rule.ages:
            case "step":
                return [self._count(self.optimizer.state[p]["step"]) + 1 for p in params]
            case "fresh":
                return [0 if new else 1 for new in fresh]
        return [0] * len(params)

    def _count(self, counter: object) -> int:
        if not isinstance(counter, torch.Tensor):
            raise InputError(f"expected the optimizer's state to hold `step` as a tensor, got {counter!r}")
        version, value = self._counted.get(counter, (-1, 0))
        if version != version_of(counter):
            value = int(counter.item())
            self._counted[counter] = version_of(counter), value
        return value

    def advance(self, params: Sequence[torch.Tensor]) -> None:
        """Count the step that was just carried out."""
        if self.rule.ages == "step":
            counters = [self.optimizer.state[p]["step"] for p in params]
            held = [self._counted[c][1] for c in counters]
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for c in counters:
                by_device.setdefault(c.device, []).append(c)
            for same in by_device.values():
                foreach_add_(same, 1.0)
            known = {c: (version_of(c), n + 1) for c, n in zip(counters, held, strict=True)}
            self._counted = known if len(known) >= len(self._counted) else {**self._counted, **known}
        self._new.clear()
        mark_stepped(self.optimizer)

    # --- what a program is given ---

    def families(
        self, groups: Sequence[int], ages: Sequence[int], forms: Sequence[tuple]
    ) -> tuple[tuple[Family, ...], list[int]]:
        """Parameters of one group and one age together; and the family of each."""
        number: dict[tuple[int, int], int] = {}
        of = [number.setdefault(key, len(number)) for key in zip(groups, ages, strict=True)]
        families = []
        for g, age in number:
            names = self.rule.numbers(self.optimizer.param_groups[g], forms[g], max(age, 1))
            families.append(Family(g, forms[g], tuple(names)))
        return tuple(families), of

    def numbers(self, plan: Plan, ages: Sequence[int], limits: Sequence[float]) -> list[float]:
        """Every slot of the plan, now."""
        age = {m.family: a for m, a in zip(plan.members, ages, strict=True)}
        values = list(limits) if plan.clips else []
        for i, family in enumerate(plan.families):
            group = self.optimizer.param_groups[family.group]
            named = self.rule.numbers(group, family.form, age[i])
            values += [float(named[name]) for name in family.names]
        return values

    def tensor(self, extra: Extra, params: Sequence[torch.Tensor], numbers: list[float]) -> torch.Tensor:
        """The tensor that a program's further input stands for."""
        match extra.kind:
            case "param":
                return params[extra.member]
            case "state":
                return self.optimizer.state[params[extra.member]][extra.name]
            case "sum":
                grad = params[extra.member].grad
                assert grad is not None
                return grad
        return self._send(numbers, extra)

    def _send(self, numbers: list[float], extra: Extra) -> torch.Tensor:
        """The numbers on their device, without waiting for it; those that did not change are there already."""
        key = extra.dtype, extra.device
        before = self._sent.get(key)
        if before is not None and before[0] == numbers:
            return before[1]
        on_gpu = extra.device is not None and extra.device.type == "cuda"
        tensor = torch.tensor(numbers, dtype=extra.dtype, pin_memory=on_gpu).to(extra.device, non_blocking=True)
        self._sent[key] = numbers, tensor
        return tensor
