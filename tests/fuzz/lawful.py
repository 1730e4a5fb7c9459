"""Differences between eager PyTorch and Tessera that are no fault of Tessera's: a table of what each is called and how
it is recognised.

A row holds narrowly. It asks whether PyTorch, doing that one thing otherwise, gives what Tessera gave, or whether both
agree on the program without that one thing. The first row that holds names the difference:

- `written`: autograd's book-keeping refuses a gradient because something was written that it needs; a functional
  program need not refuse, or saves something else.
- `node`: a compiled graph is one node to autograd, and hooks see something else.
- `merged`: equal equations are one, and one is differentiated for all, by a sum of cotangents.
- `refused`: what Tessera says it does not take.
- `beyond`: what torch.func does not do, or does otherwise than what it means.
- `dynamo`: TorchDynamo differs by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch._functorch.config
from torch import Tensor

from tessera.torch_internals.autograd import unpacks_one_by_one
from tessera.util.errors import CaptureError, DoubleBackwardError

from .runs import Ran, compared, run
from .ways import EAGERLY, Eager, Looped, Pulled, Typed, as_written, by_backend, ours, unmerged

SECOND = "backward through the graph a second"  # a graph that saved nothing is not refused by eager
# Autograd's own book-keeping refuses these; a functional program has no such book.
REFUSALS = (
    "modified by an inplace operation",
    SECOND,
    "A view was created in no_grad mode",
    "is a view of a view which was created in no_grad mode",
    "is a view and is being modified inplace",
    "is a view and its base or another view of its base has been modified inplace",
)
# What torch.func does not do.
MISSING = (
    "override the setup_context",
    "don't yet support saved tensor hooks",
    "vmap: ",
    "under vmap transform",
    "Batching rule not implemented",
    "more than one element of the written-to tensor",
    "don't support automatic differentiation",
    "ZeroTensors are immutable",
    "because it is an out= function",
    "of tensors does not require grad and does not have a grad_fn",  # of a view made under no_grad
    "You tried to vmap over _NoopSaveInput",  # checkpoint, before 2.12
)
# The same of a write under vmap, in the words of whatever kernel first meets the batch.
UNBATCHED = "doesn't match the broadcast shape"
FORWARD_MODE = ("T.jvp", "T.jacfwd", "T.hessian")


@dataclass
class Case:
    """A program that differs: what eager and Tessera gave, and the first difference in words."""

    text: str
    kind: str
    eager: Ran
    ours: Ran
    reason: str

    @property
    def refused(self) -> bool:
        """Tessera's run, by autograd's books."""
        return books_refuse(self.ours)

    def given_by(self, other: Ran) -> bool:
        """This other run gives what Tessera gave."""
        return not compared(other, self.ours, self.text, self.kind)

    def same_with(self, text: str) -> bool:
        """Another program, made of the one at hand, gives what eager gives."""
        return not compared(run(text, EAGERLY), run(text, ours(self.kind, [])), text, self.kind)

    @cached_property
    def others(self) -> Ran:
        """AOTAutograd's run, which is one node to autograd as well."""
        saving = "aot_eager_decomp_partition" if self.kind == "tile" else "aot_eager"  # the former recomputes, as tile
        with torch._functorch.config.patch(donated_buffer=False):  # it refuses to run backward twice otherwise
            return run(self.text, by_backend(saving))

    @cached_property
    def looped(self) -> Ran:
        return run(self.text, (as_written, Looped()))


def books_refuse(ran: Ran) -> bool:
    return any(words in str(ran.error) for words in REFUSALS)


# --- autograd's books ---


def eager_refuses(case: Case) -> bool:
    return books_refuse(case.eager) or SECOND in str(case.ours.error)


def all_that_is_saved_is_looked_at(case: Case) -> bool:
    """Also what is not read, where PyTorch cannot unpack one thing at a time."""
    return case.refused and not unpacks_one_by_one


def others_are_refused_too(case: Case) -> bool:
    """A compiled graph saves something else than eager, or hides fewer writes: AOTAutograd's does, too."""
    return case.refused and books_refuse(case.others)


def recomputing_is_refused(case: Case) -> bool:
    """Kernels compute again, from what may have been written, what eager saves: where it is saved, nothing differs."""
    saving = case.kind == "tile" and case.refused
    return saving and not compared(case.eager, run(case.text, ours("jit", [])), case.text, case.kind)


def eagers_zeros_have_no_memory(case: Case) -> bool:
    """A second derivative of eager's writes into zeros that it never allocated, and says so."""
    return "ZeroTensors are immutable" in str(case.eager.error) and case.kind == "second" and case.ours.error is None


def a_checkpoint_is_refused(case: Case) -> bool:
    """It would run again on something else than it ran on, which eager does without a word."""
    without = case.text.replace("checkpoint(", "called(")
    return case.refused and without != case.text and case.same_with(without)


def a_checkpoint_runs_on_what_was_written(case: Case) -> bool:
    """Eager's gradient is of what it runs on the second time; ours is of what it ran on the first time."""
    kept = case.text.replace("checkpoint(", "on_copies(")
    asked = "grad: expected" in case.reason and kept != case.text
    return asked and case.given_by(run(kept, EAGERLY))


def data_hides_a_write(case: Case) -> bool:
    """A backward reads what was written to memory that `.data` shares, without a word, where that is what it saved;
    eager and Tessera save different things. Where copies are written nothing differs."""
    copied = re.sub(r"\b(\w+)\.data\b(?! =)", r"\1.data.clone()", case.text)
    asked = "grad: expected" in case.reason and copied != case.text
    return asked and case.same_with(copied)


def integers_require_gradients(case: Case) -> bool:
    """In eager, where one number that requires them is written into integers: it is a fill, not a copy."""
    copied = re.sub(r"\] = ([xv]\d+)$", r"] = \1[None]", case.text, flags=re.MULTILINE)
    asked = "requires_grad: expected True, got False" in case.reason and copied != case.text
    return asked and case.same_with(copied)


def others_gradients_do_not_fit_either(case: Case) -> bool:
    """`out=` under no_grad changed the shape of a tensor that has a history: some of eager's formulas do not notice."""
    told = "returned an invalid gradient at index"
    return "out=" in case.text and all(told in str(ran.error) for ran in (case.ours, case.others))


def eagers_gradient_lies_over_itself(case: Case) -> bool:
    """A mask picks from an expanded tensor, and eager's backward writes into a gradient that is laid out alike, though
    forward did not refuse. A copy of the tensor is written and differentiated in the same way by both."""
    told = "more than one element of the written-to tensor" in str(case.eager.error) and case.ours.error is None
    copied = re.sub(r"(\.expand\(.*\))$", r"\1.clone()", case.text, flags=re.MULTILINE)
    return told and copied != case.text and "backward(" in case.text and case.same_with(copied)


# --- one node ---


def others_show_hooks_the_same(case: Case) -> bool:
    return not case.refused and ": hook" in case.reason and case.given_by(case.others)


def hooks_come_in_another_order(case: Case) -> bool:
    """One node tells its arguments' hooks one after the other; in eager the order is that of the graph behind. They
    are told the same."""
    sorted_ = (with_sorted_hooks(case.eager), with_sorted_hooks(case.ours))
    return ": hook" in case.reason and not compared(*sorted_, case.text, case.kind)


def with_sorted_hooks(ran: Ran) -> Ran:
    def key(told: tuple[str, Tensor]) -> tuple:
        return told[0], str(told[1].dtype), tuple(told[1].shape), told[1].flatten().tolist()

    return replace(ran, sights=[replace(sight, hooks=sorted(sight.hooks, key=key)) for sight in ran.sights])


def second_derivatives_lead_elsewhere(case: Case) -> bool:
    """A formula that reads its result leads through the hooks of that result, one that reads its operands does not."""
    lines = case.text.splitlines(keepends=True)
    without = "".join(re.sub(r"^( *).*\.register_hook\(.*", r"\1pass", line) for line in lines)
    return case.kind == "second" and ": hooks: " in case.reason and without != case.text and case.same_with(without)


def module_hooks_hand_on_zeros(case: Case) -> bool:
    """Full backward hooks hand on zeros, or None to a function that makes zeros of it."""
    absent = "grad: expected None" in case.reason or ("grad: expected" in case.reason and "got None" in case.reason)
    return absent and "register_full_backward" in case.text and case.same_with(without_module_hooks(case.text))


def a_function_hands_on_none(case: Case) -> bool:
    """Before a compiled graph None means that nothing was reached; in eager it goes on from node to node, to functions
    that make zeros of it and to hooks. Where the function hands on zeros, both agree."""
    asked = ("grad: expected" in case.reason and "got None" in case.reason) or ": hooks: expected" in case.reason
    filled = case.text.replace("Over.apply(", "Filled.apply(")
    return asked and filled != case.text and case.same_with(filled)


def a_function_makes_zeros(case: Case) -> bool:
    """Of the None that a compiled graph tells what lies before it, where eager does not come by (docs/in_place.md).
    Where the function is plain operators, both agree."""
    asked = "grad: expected None" in case.reason or case.kind == "train"
    plain = re.sub(r"\b(Scale|Gate|Cube)\.apply\(", r"\1.plain(", case.text)
    return asked and plain != case.text and case.same_with(plain)


def without_module_hooks(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "register_full_backward" not in line)


# --- infinities and signs of zeros ---


def apart_it_is_eagers(case: Case) -> bool:
    """Gradients at infinities are eager's where equal equations stay apart."""
    if "special=True" not in case.text or "grad: expected" not in case.reason:
        return False
    with unmerged():
        return not compared(case.eager, run(case.text, ours(case.kind, [])), case.text, case.kind)


def finite_it_is_eagers(case: Case) -> bool:
    """What may be differentiated again is a product as in torch.func.grad; in forward mode eager makes zeros of
    tangents that are not there, which infinities make NaN of; and under torch.func the gradient of the least or largest
    element is multiplied by a mask, which autograd fills."""
    again = case.kind == "second" and "prod(" in case.text
    ahead = case.kind == "transform" and any(name in case.text for name in FORWARD_MODE)
    masked = case.kind == "transform" and (".min()" in case.text or ".max()" in case.text)
    finite = case.text.replace(", special=True", "")
    return (again or ahead or masked) and finite != case.text and case.same_with(finite)


def nan_has_no_side(case: Case) -> bool:
    """The second tangent at a kink of what is not a number: eager's is zero, though its first is not."""
    numbers = re.sub(r"F\.(hardtanh|relu6|hardsigmoid)\((\w+)", r"F.\1(\2.nan_to_num()", case.text)
    expected, _, got = case.reason.partition("got")
    asked = case.kind == "transform" and ("nan" in got or "inf" in got) and "0." in expected
    return asked and numbers != case.text and case.same_with(numbers)


def a_negative_zero_is_either(case: Case) -> bool:
    """relu(-0.0) is either zero, as vectors end."""
    return "relu" in case.text and case.same_with(without_negative_zeros(case.text))


def without_negative_zeros(text: str) -> str:
    return text.replace(".relu_()", ".add_(0.0).relu_()").replace("F.relu(", "F.relu(0.0 + ")


def factors_are_zeros(case: Case) -> bool:
    """A gradient that is zero times something has that one's sign in eager, and none where it is not computed."""
    asked = "-0.0" in case.text and ("grad: expected" in case.reason or "g[" in case.reason)
    expected, _, got = re.sub(r"-(0\.0*\b)", r" \1", case.reason).partition("expected")[2].partition("got")
    return asked and expected.split() == got.split() and case.same_with(case.text.replace("-0.0", "2.0"))


def rounding_decides(case: Case) -> bool:
    """Derivatives in half precision may be differences of what was rounded. In float64 both agree, and first
    derivatives are hardly farther from those than eager's are."""
    exact = case.text.replace("dtype=bf16", "dtype=f64").replace("dtype=f16", "dtype=f64")
    half = "bfloat16" in case.reason or "float16" in case.reason
    second = case.kind == "second"
    asked = half and (second or "grad: expected" in case.reason)
    return asked and case.same_with(exact) and (second or hardly_farther(case, run(exact, EAGERLY)))


def hardly_farther(case: Case, exact: Ran) -> bool:
    """Where what was computed in half precision is off, eager's is off as well, by half as much at least."""
    for sight, other, right in zip(case.eager.sights, case.ours.sights, exact.sights, strict=False):
        for path, note in sight.tensors.items():
            got, want = other.tensors[path].grad, right.tensors[path].grad
            if note.grad is None or got is None or want is None or got.dtype not in (torch.bfloat16, torch.float16):
                continue
            off, eagers = (float((g.double() - want).abs().max()) for g in (got, note.grad))
            if not off <= 2 * eagers + 0.05:
                return False
    return True


def gradients_lie_apart(case: Case) -> bool:
    """Eager gives one tensor for the gradients of both summands."""
    return re.match(r"see \d+: g\[\d+\]: memory: expected g\[\d+\]", case.reason) is not None


def gradients_by_results_lie_as_these(case: Case) -> bool:
    """Eager's lie as the gradient that came."""
    return case.kind == "between" and re.match(r"see \d+: g\[\d+\]: stride: expected", case.reason) is not None


def rows_of_equals_are_rounded(case: Case) -> bool:
    """The norm of a row of equals is zero but for rounding, of either sign, and infinities come of it: it agrees where
    rows differ."""
    apart = re.sub(r"(self\.ln|F\.layer_norm)\((\w+)", r"\1(\2 + torch.arange(\2.shape[-1])", case.text)
    asked = "inf" in case.reason or "nan" in case.reason
    return asked and apart != case.text and case.same_with(apart)


# --- what Tessera says it does not take ---


def tracing_refuses(case: Case) -> bool:
    return case.kind == "functional" and isinstance(case.ours.error, CaptureError)


def contents_are_gone(case: Case) -> bool:
    """Second derivatives that need an input which is no leaf and which nothing kept (docs/training.md), and gradients
    by results or by an argument that need what the graph wrote over (docs/in_place.md)."""
    told = any(words in str(case.ours.error) for words in ("contents of the input", "random numbers are not kept"))
    over = "and the graph writes it" in str(case.ours.error)
    return (case.kind == "second" or over) and told and isinstance(case.ours.error, DoubleBackwardError)


# --- torch.func ---


def torch_func_does_not(case: Case) -> bool:
    missing = (*MISSING, UNBATCHED) if "T.vmap" in case.text else MISSING
    return case.kind == "transform" and any(words in str(case.eager.error) for words in missing)


def is_vmap(case: Case) -> bool:
    return case.kind == "transform" and "T.vmap" in case.text


def a_loop_is_refused(case: Case) -> bool:
    return is_vmap(case) and books_refuse(case.looped) and case.ours.error is None


def a_loop_gives_it(case: Case) -> bool:
    return is_vmap(case) and case.given_by(case.looped)


def typed_tangents_give_it(case: Case) -> bool:
    asked = case.kind == "transform" and "dtype: expected" in case.reason
    return asked and case.given_by(run(case.text, (as_written, Typed())))


def grad_gives_it(case: Case) -> bool:
    asked = case.kind == "transform" and "prod(" in case.text
    return asked and case.given_by(run(case.text, (as_written, Pulled())))


def detach_gives_it(case: Case) -> bool:
    """Under torch.func `.data` hides a write from the innermost transform alone."""
    hidden = case.text.replace(".data", ".detach()")
    asked = case.kind == "transform" and hidden != case.text
    return asked and case.given_by(run(hidden, (as_written, Eager())))


def nobody_reads_the_index(case: Case) -> bool:
    """Eager's kernel complains of indices that nothing depends on."""
    unread = isinstance(case.eager.error, IndexError) and case.ours.error is None
    inside = re.sub(r"torch\.tensor\(\[[\d, ]+\]\)", lambda index: re.sub(r"\d+", "0", index[0]), case.text)
    return unread and (case.given_by(run(case.text, by_backend("aot_eager"))) or case.given_by(run(inside, EAGERLY)))


def nobody_reads_what_kernels_refuse(case: Case) -> bool:
    """Eager's kernel refuses to multiply two dtypes or to subtract truth values; PyTorch's rule for types does not, so
    where nothing depends on the result, nobody complains."""
    told = any(
        words in str(case.eager.error) for words in ("have the same dtype, but got", "with a bool tensor is not")
    )
    return told and case.ours.error is None and case.given_by(run(case.text, by_backend("aot_eager")))


def a_checkpoint_that_failed_leaves_its_hooks(case: Case) -> bool:
    """In eager, until somebody collects its generator (PyTorch 2.11)."""
    left = "expected {'hooks on all saved tensors': True}, got {}" in case.reason
    return left and case.eager.error is not None and "checkpoint(" in case.text


def nobody_reads_what_no_kernel_computes(case: Case) -> bool:
    """Eager has no kernel for the dtype; where nothing depends on the result, AOTAutograd's graph goes on, too."""
    told = "not implemented for" in str(case.eager.error)
    return told and str(case.eager.error) not in (str(case.ours.error), str(case.others.error))


def a_parameter_turns_the_comparison(case: Case) -> bool:
    """Its class is a subclass of the other's, so Python asks it first: eager computes `p < v`, laid out as p is."""
    plain = re.sub(r"([<>]=?|[=!]=) *(self\.p\d+)", r"\1 (\2 + 0)", case.text)
    return "stride: expected" in case.reason and plain != case.text and case.same_with(plain)


# --- Dynamo ---


def dynamo_differs(case: Case) -> bool:
    """With a backend that changes nothing."""
    if case.kind == "functional":
        return False
    theirs = run(case.text, by_backend("eager"))
    unseen = case.ours.error is None and str(theirs.error) != str(
        case.eager.error
    )  # it raises something else, if at all
    return unseen or bool(compared(case.eager, theirs, case.text, case.kind))


LAWFUL: list[tuple[str, Callable[[Case], bool]]] = [
    ("written", eager_refuses),
    ("beyond", torch_func_does_not),  # before AOTAutograd runs the program: of mse_loss it dies
    ("written", all_that_is_saved_is_looked_at),
    ("written", others_are_refused_too),
    ("written", recomputing_is_refused),
    ("written", data_hides_a_write),
    ("written", integers_require_gradients),
    ("written", others_gradients_do_not_fit_either),
    ("written", eagers_gradient_lies_over_itself),
    ("written", eagers_zeros_have_no_memory),
    ("node", others_show_hooks_the_same),
    ("node", hooks_come_in_another_order),
    ("written", a_checkpoint_is_refused),
    ("written", a_checkpoint_runs_on_what_was_written),
    ("node", module_hooks_hand_on_zeros),
    ("node", a_function_hands_on_none),
    ("node", a_function_makes_zeros),
    ("node", second_derivatives_lead_elsewhere),
    ("merged", apart_it_is_eagers),
    ("refused", tracing_refuses),
    ("beyond", finite_it_is_eagers),
    ("refused", contents_are_gone),
    ("written", a_loop_is_refused),
    ("beyond", a_loop_gives_it),
    ("beyond", typed_tangents_give_it),
    ("beyond", grad_gives_it),
    ("beyond", detach_gives_it),
    ("beyond", nobody_reads_the_index),
    ("beyond", nobody_reads_what_kernels_refuse),
    ("beyond", nan_has_no_side),
    ("beyond", a_negative_zero_is_either),
    ("beyond", factors_are_zeros),
    ("beyond", rounding_decides),
    ("beyond", rows_of_equals_are_rounded),
    ("node", gradients_lie_apart),
    ("node", gradients_by_results_lie_as_these),
    ("beyond", a_parameter_turns_the_comparison),
    ("beyond", nobody_reads_what_no_kernel_computes),
    ("beyond", a_checkpoint_that_failed_leaves_its_hooks),
    ("dynamo", dynamo_differs),
]
