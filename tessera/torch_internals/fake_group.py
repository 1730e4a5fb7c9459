"""A process group of ranks that are not there. Importing this takes a while."""

from __future__ import annotations

from tessera.torch_internals.lookup import symbol

FakeStore = symbol("torch.testing._internal.distributed.fake_pg.FakeStore", "being one rank of many that do not run")
