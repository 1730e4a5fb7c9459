"""Equations merged into groups, as long as the groups can still be put into an order.

A set of groups may become one only if no path leaves the set and comes back. A group's number is that of its first
equation. The groups stand in an order in which each follows those that it needs: a path between two of them visits only
groups that stand between them, so that a merge of neighbours looks at few, however long the program is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable


class Groups:
    def __init__(self, needs: list[set[int]]) -> None:
        self.of = list(range(len(needs)))  # equation -> its group
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        self.before: dict[int, set[int]] = {i: set(need) for i, need in enumerate(needs)}
        self.after: dict[int, set[int]] = {i: set() for i in self.of}
        self.place = dict(enumerate(self.of))  # group -> its place in the order
        self.order: list[int | None] = list(self.of)  # what is merged leaves its place empty
        # As bits, the equations that those of a group need without any merge: paths that are seen at once.
        self.above: dict[int, int] = {}
        for i, need in enumerate(needs):
            mask = 0
            for j in need:
                mask |= self.above[j] | (1 << j)
                self.after[j].add(i)
            self.above[i] = mask

    def convex(self, groups: Iterable[int]) -> bool:
        """No path leads out of these groups and back in."""
        return self._leading_to(set(groups)) is not None

    def independent(self, groups: Iterable[int]) -> bool:
        """No path leads from one of these groups to another."""
        chosen = set(groups)
        return all(chosen.isdisjoint(self.before[g]) for g in chosen) and self.convex(chosen)

    def _leading_to(self, chosen: Collection[int]) -> set[int] | None:
        """What stands between these groups and leads to one of them; None where something of it follows one."""
        first = min(self.place[g] for g in chosen)
        mask = sum(1 << i for g in chosen for i in self.members[g])
        leading: set[int] = set()
        stack = [p for g in chosen for p in self.before[g] if self.place[p] > first and p not in chosen]
        while stack:
            g = stack.pop()
            if g in leading:
                continue
            if self.above[g] & mask:
                return None
            leading.add(g)
            for p in self.before[g]:
                if p in chosen:
                    return None
                if self.place[p] > first:
                    stack.append(p)
        return leading

    def join(self, groups: Iterable[int]) -> int:
        """Make one group of several that are convex together."""
        chosen = sorted(set(groups))
        keep, gone = chosen[0], chosen[1:]
        if not gone:
            return keep
        self._put(keep, chosen)
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
        self.above[keep] = functools.reduce(int.__or__, (self.above.pop(g) for g in chosen))
        return keep

    def _put(self, keep: int, chosen: list[int]) -> None:
        """One place for all of these: behind what leads to them, before everything else that stood between them."""
        leading = self._leading_to(chosen)
        assert leading is not None, "a path leads out of groups that are joined, and back in"
        places = [self.place.pop(g) for g in chosen]
        first, last = min(places), max(places)
        for place in places:
            self.order[place] = None
        if leading:
            between = [g for g in self.order[first : last + 1] if g is not None]
            ahead = [g for g in between if g in leading]
            ordered = [*ahead, keep, *(g for g in between if g not in leading)]
            self.order[first : last + 1] = [*ordered, *[None] * (last + 1 - first - len(ordered))]
            self.place.update((g, first + i) for i, g in enumerate(ordered))
        else:
            self.order[first], self.place[keep] = keep, first

    def move(self, i: int, group: int) -> None:
        """Hand an equation that only this group reads over to it. Nothing can be joined after that."""
        self.members[self.of[i]].remove(i)
        self.members[group] = sorted([*self.members[group], i])
        self.of[i] = group
