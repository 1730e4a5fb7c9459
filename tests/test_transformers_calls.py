"""`generate` calls a compiled model of transformers as it is, and no class of transformers is changed for that."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch.nn.modules.module import _global_module_registration_hooks

import tessera

transformers = pytest.importorskip("transformers")

from generation import model_of  # noqa: E402

NAME = "get_compiled_call"
CLASS = transformers.PreTrainedModel
THEIRS = vars(CLASS)[NAME]


def test_a_compiled_model_calls_itself() -> None:
    model = model_of("llama")
    fast = tessera.jit(model)
    assert fast.get_compiled_call(None) == fast.__call__
    assert vars(CLASS)[NAME] is THEIRS and NAME not in vars(type(model)) and NAME not in vars(model)
    assert model.get_compiled_call.__func__ is THEIRS


def test_a_model_whose_forward_is_compiled_calls_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLASS, NAME, lambda self, config: f"theirs, {config}")
    model = model_of("llama")
    compiled = tessera.jit(model.forward)
    assert model.get_compiled_call("config") == "theirs, config"  # somebody else may use what was compiled
    model.forward = compiled
    assert model.get_compiled_call("config") == model.__call__
    other = copy.deepcopy(model)
    assert other.get_compiled_call("config") == other.__call__
    assert model_of("llama").get_compiled_call("config") == "theirs, config"


def test_it_goes_with_what_was_compiled() -> None:
    model = model_of("llama")
    model.forward = tessera.jit(model.forward)
    assert NAME in vars(model)
    del model.forward
    gc.collect()
    assert NAME not in vars(model)


def test_a_model_of_which_a_part_is_compiled_is_left_alone() -> None:
    """PyTorch's hooks on all modules are not used to find it."""
    hooks = dict(_global_module_registration_hooks)
    model = model_of("llama")
    model.model = tessera.jit(model.model)
    assert model.get_compiled_call.__func__ is THEIRS and NAME not in vars(model)
    assert dict(_global_module_registration_hooks) == hooks


def test_a_model_is_pickled_without_it() -> None:
    model = model_of("llama")
    compiled = tessera.jit(model.forward)
    again = pickle.loads(pickle.dumps(model))
    assert again.get_compiled_call.__func__ is THEIRS and again.get_compiled_call.__self__ is again
    del compiled


def test_other_models_have_nothing_of_it() -> None:
    model = torch.nn.Linear(2, 2)
    fast, forward = tessera.jit(model), tessera.jit(model.forward)
    assert not hasattr(fast, NAME) and NAME not in vars(model) and callable(forward)
