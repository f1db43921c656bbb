"""The steps of a smoketest: each runs eagerly and compiled from one state, is judged, and is gone on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.layer.compiled_modules import JoinedModules, original_of
from pytest_torchcompile.layer.disturbance import Disturbed, disturb
from pytest_torchcompile.layer.kept_gradients import Gradients
from pytest_torchcompile.layer.mean_comparison import Means, compare_means, drew
from pytest_torchcompile.layer.optimizer_step import Descent, adapted
from pytest_torchcompile.layer.preservation import DeepSnapshot
from pytest_torchcompile.layer.rank_votes import RankVotes
from pytest_torchcompile.layer.step_checks import StepFailed, alone, of_compiler, refuse_differences, refuse_user_error
from pytest_torchcompile.layer.step_values import finite, said, usable
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle import Fault, Recording, Reference, Tape, compare, note, problem, record, reference
from pytest_torchcompile.oracle.held import Held, later
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.units import program_unit
from pytest_torchcompile.oracle.variation import rolled, varied
from pytest_torchcompile.state.bits import same_bits

__all__ = ["Steps"]

_UNASKED = frozenset({"rng", "stride"})
"""What may differ in a smoketest: Inductor draws random numbers of its own, and lays memory out as it likes."""
_VALUES = frozenset({"value", "gradient", "buffer", "mutation", "nondeterministic"})
"""What chance may explain."""
_OTHER_SEED = 1000


class Steps:
    """The loop of a smoketest over one batch. ``module`` holds all that ``model`` and the optimiser work on.

    Where the model is spread over ranks, each of them does the same calls in the same order, whatever it finds. What
    may raise on one alone is done in :meth:`RankVotes.run_agreed`, and each condition of a call is a vote. That goes
    for our own work between the calls too: memory may be short on one rank, an object of the model's unreadable.
    """

    def __init__(
        self, model: Callable[..., Any], module: nn.Module, batch: Batch, optimizer: Any,
        loss_fn: Callable[..., Any] | None, together: RankVotes,
    ) -> None:  # fmt: skip
        self.model, self.module, self.batch = model, module, batch
        self.together = together
        self.noted: Callable[[], BaseException | None] = lambda: None
        """What failed compiled and was run eagerly instead, as other ranks were waiting."""
        self._now, self._varies = batch, True
        """The batch of this step, and whether the model takes other values than the user's."""
        self.loss = None if loss_fn is None else adapted(loss_fn)
        self.grad = torch.is_grad_enabled()
        tensors = [*module.parameters(), *module.buffers(), *batch.tensors()]
        asked = module.training and self.grad and any(t.requires_grad for t in tensors)
        self.train = optimizer is not None or loss_fn is not None or asked
        self.optimizer, self.stepping = Descent(module) if optimizer is None else optimizer, optimizer is not None
        self.cuda = any(t.is_cuda for t in tensors)
        self.ledgers: list[Ledger] = []  # one for each compiled step, and not for the eager runs between them
        self.notes: dict[str, None] = {}
        self.backward = False
        self.averaged = 0
        """Over how many runs means were compared; 0: every value was."""
        self._held = Held(), Held()
        """What became of the outputs of the step before, eagerly and compiled."""
        self._ran = 0
        self._spoke = False
        self._doubts: dict[str, str] = {}
        """Leaves that differ where random numbers are drawn, or eager itself wavers: means have to judge."""
        self._exactly: list[Callable[[], dict[str, str]]] = []
        """Of each step with doubts: which leaves differ from what the same draws give in float64."""

    def run(self, step: int) -> None:
        """One step. Raises :class:`StepFailed`, or :class:`~.rank_votes.FailedElsewhere`."""
        agreed = self.together.run_agreed
        before = agreed(lambda: DeepSnapshot(self.module))
        eager, tape = self._eagerly(step, before)
        kept = agreed(lambda: self._held[0].after(eager))
        agreed(lambda: self._check_learns(eager, step))
        agreed(before.restore)
        gradients = Gradients(self.module)
        with observe() as seen:
            self.ledgers.append(seen)
            compiled = agreed(lambda: self._record(self._holding(1, self._compiled), step, gradients))
        agreed(lambda: self._check_ran(compiled, seen, step))
        self._check_equal(eager, compiled, tape, before, step)
        agreed(lambda: self._check_held(kept, self._held[1].after(compiled), step))
        agreed(lambda: self._check_finite(compiled, step))
        self._spoke = agreed(lambda: self._spoke or said(compiled))
        if compiled.backward:
            self.backward = True
            agreed(lambda: self._step(gradients.found, eager, step))

    def finish(self) -> None:
        """What can be told only after the last step. Raises as :meth:`run`."""
        agreed = self.together.run_agreed
        agreed(self._check_spoke)
        agreed(self._check_still)
        if not self.together.any_rank(bool(self._doubts)):
            return
        before, self._now = agreed(lambda: DeepSnapshot(self.module)), self.batch

        def eager(seed: int) -> Recording:
            agreed(before.restore)
            return self._eager(seed, None)

        def compiled(seed: int) -> Recording:
            agreed(before.restore)
            return self._record(self._compiled, seed, None)

        with observe() as seen:
            self.ledgers.append(seen)
            means = compare_means(eager, compiled, self.together.any_rank)
        agreed(lambda: self._check_means(means))
        self.averaged = means.runs
        self.notes[f"draws random numbers, or is not deterministic: compared by the means of {means.runs} runs"] = None

    def _check_learns(self, eager: Recording, step: int) -> None:
        if self.stepping and not eager.backward:
            raise StepFailed("the loss does not depend on anything that requires a gradient, eagerly too", "loss", step)

    def _check_means(self, means: Means) -> None:
        if means.error:
            raise StepFailed(means.error, "comparison")
        fixed = self._doubts.keys() - means.random  # they differ by an assumed scale, which may be off
        exact = {name: text for judge in self._exactly if fixed for name, text in judge().items() if name in fixed}
        wrong = [found[name] for name in self._doubts for found in (means.apart, exact) if name in found]
        if wrong:
            raise StepFailed(wrong[0], "comparison", evidence="\n".join(wrong))

    def _check_spoke(self) -> None:
        if not self._spoke:
            raise StepFailed("every output and every gradient is zero or not finite: that they agree proves nothing",
                         "comparison")

    # what is run

    def _eagerly(self, step: int, before: DeepSnapshot) -> tuple[Recording, Tape]:
        """Eager's step. From the second on with other values, if the model takes them: else a result that is only
        kept from the step before could not be told from a right one.
        """
        agreed = self.together.run_agreed
        if step > 1 and self._varies:
            self._now, tape = agreed(lambda: varied(rolled(self.batch), step)), Tape()
            eager = agreed(lambda: self._eager(step, tape))
            if not self.together.any_rank(agreed(lambda: eager.error is not None or not usable(eager))):
                return eager, tape
            self._now, self._varies = self.batch, False
            agreed(before.restore)
        tape = Tape()
        eager = agreed(lambda: self._eager(step, tape))
        if self.together.any_rank(eager.error is not None):  # perhaps the model objects to the tape
            agreed(before.restore)
            eager = agreed(lambda: self._eager(step, None))
        agreed(lambda: refuse_user_error(eager.error, step))
        return eager, tape

    def _eager(self, seed: int, mode: Any) -> Recording:
        with eager_on_purpose():
            return self._record(self._holding(0, self._call), seed, mode, eager=True)

    def _holding(self, side: int, call: Callable[..., Any]) -> Callable[..., Any]:
        # CUDA graphs do overwrite the outputs of the step before
        return call if self.cuda else self._held[side].holding(call)

    def _record(self, call: Callable[..., Any], seed: int, mode: Any, eager: bool = False) -> Recording:
        found: Recording | Exception
        try:
            found = record(call, self.module, self._now, loss=self.loss, train=self.train, seed=seed, mode=mode,
                           rest=False)
        except UsageError as error:  # a loss that is no single number
            found = StepFailed(str(error), "loss", seed, user_error=error)
        except Exception as error:
            found = error
        finally:
            self.together.reshard()
        raised = found if isinstance(found, Exception) else found.error.exception if found.error else None
        self._meet(raised, seed, eager)
        if isinstance(found, Exception):
            raise found
        return found

    def _meet(self, raised: BaseException | None, step: int, eager: bool = False) -> None:
        """Wait for the other ranks after a call; no vote of ours may come between the collectives of theirs."""
        if missing := self.together.ended(raised is not None, eager):
            raise alone(raised, missing, self.together.left, step) from raised

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.grad or self.train):  # record() without a backward pass switches it off
            return self.model(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        step_begins()
        graphs = self.ledgers[-1].graphs
        before = sum(graph.runs for graph in graphs)
        try:
            return self._call(*args, **kwargs)
        finally:
            self._ran = sum(graph.runs for graph in graphs) - before

    def _step(self, gradients: list[tuple[torch.Tensor, torch.Tensor]], eager: Recording, step: int) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        try:
            self._take_step(eager)
        except Exception as error:
            for name, parameter in self.module.named_parameters():
                parameter.grad = eager.gradients.get(f"gradient of {name}")
            try:
                self._take_step(eager)
            except Exception:
                raise StepFailed(f"the optimiser raises {type(error).__name__}, eagerly too: {error}", "step", step,
                                 user_error=error) from error
            raise StepFailed(f"the optimiser raises {type(error).__name__} for the compiled gradients, for those of "
                             f"eager it does not: {error}", "step", step) from error
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not finite(parameter):
                raise StepFailed(f"parameter {name} is not finite after the optimiser's step", "step", step)
        self.optimizer.zero_grad()

    def _take_step(self, eager: Recording) -> None:
        if type(self.optimizer) is torch.optim.LBFGS:
            self.optimizer.step(lambda: eager.loss)  # type: ignore[no-untyped-call]
        else:
            self.optimizer.step()

    # what came of it

    def _check_ran(self, compiled: Recording, seen: Ledger, step: int) -> None:
        if compiled.error is not None:
            raise of_compiler(compiled.error, step)
        if (error := self.noted()) is not None:
            raise of_compiler(Fault.of(error, "compiled code"), step)
        frames = "\n".join(f"{f.function}  {f.file}:{f.line}  {f.kind}: {f.reason}" for f in seen.eager_frames)
        if seen.failures:
            raise StepFailed("it did not compile and ran eagerly instead", "forward", step,
                         "\n".join(f"{f.function}  {f.file}:{f.line}  {f.type}: {f.message}" for f in seen.failures))
        if silent := sorted({f.kind for f in seen.eager_frames if f.kind in SILENT}):
            raise StepFailed(f"a part silently ran eagerly: {', '.join(silent)}", "forward", step, frames)
        if not self._ran:
            raise StepFailed("nothing was compiled: the forward pass ran no compiled graph", "forward", step, frames)
        if seen.lost:
            raise StepFailed("what ran compiled could not be told", "forward", step, "\n".join(seen.lost))
        if seen.graph_breaks:
            self.notes[f"{len(seen.graph_breaks)} graph break(s)"] = None

    def _check_still(self) -> None:
        """A model that falls back to eager by itself hides why: a backward pass that failed, a graph that raised."""
        batch = self.together.run_agreed(self.batch.clone)
        with observe() as seen:
            self.ledgers.append(seen)
            try:
                with torch.set_grad_enabled(self.grad or self.train):
                    self._compiled(*batch.args, **batch.kwargs)
            except Exception as error:
                self._meet(error, 0)
                raise
        self.together.reshard()
        self._meet(None, 0)
        if not self._ran:
            why = "after the last step nothing ran compiled any more: it has fallen back to eager"
            raise StepFailed(why, "forward")

    def _check_finite(self, seen: Recording, step: int) -> None:
        """What agrees with eager can still be no number."""
        found = [("the loss", "loss", seen.loss)] if self.train else []
        for name, phase, tensor in [*found, *((n, "backward", g) for n, g in seen.gradients.items())]:
            if tensor is not None and not finite(tensor):
                raise StepFailed(f"{name} is not finite, eagerly too", phase, step)

    def _check_equal(self, eager: Recording, compiled: Recording, tape: Tape, before: DeepSnapshot, step: int) -> None:
        agreed = self.together.run_agreed
        expected = self._expected(eager, compiled, tape, before, step)
        random = agreed(lambda: drew(eager, step))
        # What was drawn decides more than rounding, so no float64 run is asked where other numbers were drawn.
        scale = (lambda: _assumed(eager, tape)) if random else expected
        doubts, wrong = agreed(lambda: self._differences(eager, compiled, scale, random))
        alone = random and doubts and not any(name == "loss" or name.startswith("output") for name in doubts)
        if self.together.any_rank(bool(alone)):
            vary = agreed(lambda: self._outputs_vary(eager, before, step))
            if self.together.any_rank(bool(vary and alone)):
                # Outputs that depend on the draws agree: the same were drawn, so that chance excuses nothing else.
                again = agreed(lambda: self._differences(eager, compiled, expected, False))
                doubts, wrong = again if vary and alone else (doubts, wrong)
        self._doubts = doubts | self._doubts
        if doubts:
            self._exactly.append(lambda: self._differences(eager, compiled, expected, True)[0])
        agreed(lambda: refuse_differences(wrong, step))

    def _check_held(self, eager: dict[str, str], compiled: dict[str, str], step: int) -> None:
        """Memory that is only shared is no fault yet: a constant may be handed out again and again."""
        changed = {name: what for name, what in compiled.items() if what == "changed"}
        both = {name: what for name, what in changed.items() if eager.get(name) == what}
        refuse_differences([text for leaf in later(both, changed, f"step {step}") if (text := problem(leaf))], step)

    def _differences(
        self, eager: Recording, compiled: Recording, expected: Callable[[], Reference], random: bool
    ) -> tuple[dict[str, str], list[str]]:
        """What chance has to judge, by leaf, and what is wrong whatever was drawn."""
        doubts: dict[str, str] = {}
        wrong = []
        for leaf in compare(eager, compiled, expected):
            text = problem(leaf) or (note(leaf) if leaf.kind == "nondeterministic" else None)
            if text is None or leaf.kind in _UNASKED:
                continue
            if leaf.kind in _VALUES and (random or leaf.kind == "nondeterministic"):
                doubts[leaf.name] = text
            else:
                wrong.append(text)
        return doubts, wrong

    def _expected(
        self, eager: Recording, compiled: Recording, tape: Tape, before: DeepSnapshot, step: int
    ) -> Callable[[], Reference]:
        """What values that differ are measured against: made when it is asked for, but over ranks made for all."""
        batch = self._now
        if not self.together.spread:
            return lambda: self._reference(eager, tape, before, step, batch)
        any_, agreed = self.together.any_rank, self.together.run_agreed
        found = _assumed(eager, tape)

        def leaves(scale: Reference) -> list[Leaf]:
            return agreed(lambda: compare(eager, compiled, scale))

        if any_(any(leaf.kind in _VALUES and not leaf.bitwise for leaf in leaves(found))):
            found = drawn = agreed(lambda: self._disturbed(eager, tape, before, step))
            if any_(any(problem(leaf) for leaf in leaves(drawn))):
                agreed(lambda: self._further(drawn, before))
        return lambda: found

    def _further(self, drawn: Disturbed, before: DeepSnapshot) -> None:
        with self._as_before(before):
            drawn.further()

    def _disturbed(self, eager: Recording, tape: Tape, before: DeepSnapshot, step: int) -> Disturbed:
        batch = self._now
        state = [*self.module.parameters(), *self.module.buffers()]
        unit = program_unit((*state, *batch.tensors()), tape.unit)

        def begin(seed: int, factor: float) -> None:
            before.restore()
            self._now = batch.clone()
            if factor:
                disturb((*state, *self._now.tensors()), seed, factor * unit)

        def run(seed: int, factor: float) -> Recording:
            try:
                self.together.run_agreed(lambda: begin(seed, factor))
                with eager_on_purpose():
                    return self._record(self._call, step, None)
            finally:
                self._now = batch

        with self._as_before(before):
            return Disturbed(eager, run)

    def _reference(self, eager: Recording, tape: Tape, before: DeepSnapshot, step: int, batch: Batch) -> Reference:
        assumed = _assumed(eager, tape)
        if isinstance(self.module, JoinedModules):
            return assumed
        model = original_of(self.model)
        direct = self.module is model or not any(True for _ in self.module.parameters())
        with self._as_before(before):
            found = reference(model if direct else self.module, batch, loss=self.loss, train=self.train,
                              seed=step, tape=tape, call=None if direct else model, draw=False)
            # a function may be bound to this very module, and a copy of it computes something else
            same = direct or not any(map(problem, compare(eager, found.twin(), lambda: assumed)))
        return found if same else assumed

    def _outputs_vary(self, eager: Recording, before: DeepSnapshot, step: int) -> bool:
        with self._as_before(before):
            other = self._eager(_OTHER_SEED + step, None)
        mine, found = ({n: i.value for n, i in seen.outputs.items() if isinstance(i.value, torch.Tensor)}
                       for seen in (eager, other))
        return any(not same_bits(mine[name], found[name]) for name in mine.keys() & found.keys())

    @contextmanager
    def _as_before(self, before: DeepSnapshot) -> Iterator[None]:
        after = self.together.run_agreed(lambda: DeepSnapshot(self.module))
        self.together.run_agreed(before.restore)
        try:
            yield
        finally:
            after.restore()


def _assumed(eager: Recording, tape: Tape) -> Reference:
    """A scale made from the dtype, or from that of autocast."""
    found = Reference(eager)
    found.unit = tape.unit or 0.0
    return found
