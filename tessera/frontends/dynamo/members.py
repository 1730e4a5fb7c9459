"""The blocks of a program that were not traced, because they equal one that was: whether they still do.

In: pairs of modules, the traced one and its equal. Out: a guard, asked at every call, and the tensors of the untraced
ones, which the program takes after Dynamo's inputs. A call compares the versions of the dictionaries that hold the
modules' attributes (a changed one has another) and the kinds of their tensors. Where a version moved, that module is
compared with the traced one again. What the traced one depends on, Dynamo guards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set

import torch
from torch import nn

from tessera.frontends.dynamo.equal_modules import Match, match, same_constants
from tessera.torch_internals.tracing import dict_version, tensor_guards


class Member:
    """A module that was not traced."""

    def __init__(self, traced: nn.Module, module: nn.Module, compared: Match, read: Set[str], order: tuple[str, ...]):
        """`read`: names that the traced one may have read: constants of these are equal. `order`: the places of the
        tensors that the program takes."""
        self.traced, self.module, self.read, self.order = weakref.ref(traced), weakref.ref(module), read, order
        self._keep(compared)

    def _keep(self, compared: Match) -> None:
        """Of the comparison, what keeps no module alive."""
        self.tensors, self.tables = compared.tensors, compared.tables
        self.lists = [(now, before) for name, now, before in compared.lists if name in self.read]

    def look_again(self) -> bool:
        """It equals the traced one as before, with these tensors in these places or with others."""
        traced, module = self.traced(), self.module()
        if traced is None or module is None:
            return False
        now = match(traced, module)
        if now.differences or now.constants.keys() & self.read or now.tensors.keys() != self.tensors.keys():
            return False
        self._keep(now)
        return True


class Members:
    """All such modules of one program."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.owners: dict[int, int] = {}  # by the id of a tensor, that of its module
        self.by_module: dict[int, tuple[Member, int]] = {}  # by its id: the member, and where its tensors begin
        self.tensors: list[torch.Tensor] = []  # what the program takes
        self._tables: list[dict] = []
        self._versions: list[int] = []
        self._lists: list[tuple[object, object]] = []
        self._kinds: Callable[..., bool] | None = None  # made when it is first asked
        self._gone = False

    def add(self, member: Member) -> int:
        """Where its tensors begin."""
        module, place = member.module(), len(self.tensors)
        self.members.append(member)
        self.by_module[id(module)] = (member, place)
        self.owners.update((id(t), id(module)) for t in member.tensors.values())
        self._keep(member)
        self.tensors += (member.tensors[place] for place in member.order)
        weakref.finalize(module, _forget, weakref.ref(self)).atexit = False
        return place

    def hold(self) -> bool:
        """The guard."""
        if list(map(dict_version, self._tables)) != self._versions and not self._look_again():
            return False
        if not all(same_constants(now, before) for now, before in self._lists):
            return False
        if self._kinds is None:
            self._kinds = tensor_guards(self.tensors)
        return not self._gone and self._kinds(*self.tensors)

    def _look_again(self) -> bool:
        if self._gone or not all(member.look_again() for member in self._moved()):
            return False
        self._tables, self._versions, self._lists = [], [], []
        for member in self.members:
            self._keep(member)
        self.tensors[:] = [m.tensors[place] for m in self.members for place in m.order]
        return True

    def _moved(self) -> list[Member]:
        known = dict(zip(map(id, self._tables), self._versions, strict=True))
        return [m for m in self.members if any(known.get(id(t)) != dict_version(t) for t in m.tables)]

    def _keep(self, member: Member) -> None:
        self._tables += member.tables
        self._versions += map(dict_version, member.tables)
        self._lists += member.lists

    def forget(self) -> None:
        """A module is gone, and with it the program: its tensors are not kept."""
        self._gone = True
        self.members, self.by_module, self.tensors[:] = [], {}, []
        self._tables, self._versions, self._lists = [], [-1], []


def _forget(reference: weakref.ref[Members]) -> None:
    if (members := reference()) is not None:
        members.forget()
