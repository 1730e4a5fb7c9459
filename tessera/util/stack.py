"""A stack that every thread has for itself: what is being recorded or built just now.

In: a thread pushes what it works on and pops it when done. Out: `stack[-1]` is the innermost of the same thread, so
that two threads that compile at once never see each other's program.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Stack(threading.local, Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []

    def append(self, item: T) -> None:
        self.items.append(item)

    def pop(self) -> T:
        return self.items.pop()

    def __getitem__(self, place: int) -> T:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)
