"""Equations merged into groups, as long as the groups can still be put into an order.

A set of groups may become one only if no path leaves the set and comes back. Sets of groups are bit masks over the
numbers of equations; a group's number is that of its first equation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable


class Groups:
    def __init__(self, needs: list[set[int]]) -> None:
        self.of = list(range(len(needs)))  # equation -> its group
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        self.before: dict[int, set[int]] = {i: set(need) for i, need in enumerate(needs)}
        self.after: dict[int, set[int]] = {i: set() for i in self.of}
        self.above: dict[int, int] = {}  # group -> mask of all groups it follows
        for i, need in enumerate(needs):
            mask = 0
            for j in need:
                mask |= self.above[j] | (1 << j)
                self.after[j].add(i)
            self.above[i] = mask

    def convex(self, groups: Iterable[int]) -> bool:
        """No path leads out of these groups and back in."""
        chosen = set(groups)
        mask = sum(1 << g for g in chosen)
        return not any(self.above[p] & mask for g in chosen for p in self.before[g] if p not in chosen)

    def join(self, groups: Iterable[int]) -> int:
        """Make one group of several that are convex together."""
        chosen = sorted(set(groups))
        keep, gone = chosen[0], chosen[1:]
        if not gone:
            return keep
        mask = sum(1 << g for g in chosen)
        self.members[keep] = sorted(i for g in chosen for i in self.members.pop(g))
        for i in self.members[keep]:
            self.of[i] = keep
        before = set().union(*(self.before.pop(g) for g in chosen)).difference(chosen)
        after = set().union(*(self.after.pop(g) for g in chosen)).difference(chosen)
        self.before[keep], self.after[keep] = before, after
        for neighbours, others in ((self.after, before), (self.before, after)):
            for g in others:
                neighbours[g].difference_update(gone)
                neighbours[g].add(keep)
        above = functools.reduce(int.__or__, (self.above.pop(g) for g in chosen)) & ~mask
        self.above[keep] = above
        with_keep = above | 1 << keep
        for g, its in self.above.items():
            if its & mask:
                self.above[g] = (its & ~mask) | with_keep
        return keep

    def move(self, i: int, group: int) -> None:
        """Hand an equation that only this group reads over to it. Nothing can be joined after that."""
        self.members[self.of[i]].remove(i)
        self.members[group] = sorted([*self.members[group], i])
        self.of[i] = group
