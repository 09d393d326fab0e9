"""The search for layers finds some wherever single ones hold the target."""

import math

import torch
from halfsafe.precision.analysis import session as a
from halfsafe.precision.analysis.analysis_rules import analysis_text
from halfsafe.precision.analysis.candidates import Candidate
from halfsafe.precision.analysis.layer_error import Measure
from halfsafe.precision.analysis.search import MAX_TRIALS, RETRIALS, Search
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.plain_weights import plain_weights

TARGET = 20.0
BOUND = 10 ** (-TARGET / 10)
CALLS = 4
FITS, FAILS = st.floats(1e-6, 0.9 * BOUND), st.floats(1.2 * BOUND, 100.0)


def together(noises, chosen, cross):
    """The noise power of some layers: the powers' sum, and more or less of it where two of them meet."""
    own = sum(noises[index] for index in chosen)
    return own * (1 + cross * math.sin(sum(chosen)) * (len(chosen) > 1))


def lonely(count, place, fits=0.5 * BOUND, guess=1.0):
    """Noises of layers of which one alone fits, and what is expected of each."""
    return [fits if index == place else 10.0 for index in range(count)], [guess] * count


@given(
    noises=st.lists(st.one_of(FITS, FAILS, st.just(math.inf)), min_size=1, max_size=22),
    guesses=st.lists(st.floats(1e-9, 1.0), min_size=22, max_size=22),
    cross=st.floats(-0.5, 0.5),
)
@example(*lonely(22, 21), 0.0)
@settings(max_examples=300, deadline=None)
def test_a_layer_that_holds_the_target_alone_is_found_wherever_it_stands(noises, guesses, cross):
    search = Search(
        lambda names: -10 * math.log10(together(noises, sorted(map(int, names)), cross)),
        {str(index): guess for index, guess in enumerate(guesses)},
    )
    chosen = search.choose([(str(index),) for index in range(len(noises))], TARGET)
    assert bool(chosen) == any(noise <= BOUND for noise in noises)
    assert search.trials <= MAX_TRIALS and 10 ** (-search.known[chosen] / 10) <= BOUND * (1 + 1e-9)


def test_of_many_layers_those_of_the_least_error_are_tried_alone():
    noises, _ = lonely(900, 450)
    guesses = [1.0 + index for index in range(900)]
    guesses[450] = 10.5
    search = Search(
        lambda names: -10 * math.log10(sum(noises[int(name)] for name in names)), dict(zip(map(str, range(900)), guesses, strict=True))
    )
    assert search.choose([(str(index),) for index in range(900)], TARGET) == {"450"}


class Synthetic:
    """A model of layers whose noise in each call is given, and in a free run; a trial's result is off by that much.

    Args:
        noises: for each layer its noise power in each call, and at the end of a free run.
        own: the SNR in dB that each layer is measured with by itself.
    """

    def __init__(self, noises, own, cross=0.0):
        self.noises, self.cross = noises, cross
        layers = [torch.nn.Linear(1, 1) for _ in noises]
        subjects = [a.Subject(str(index), "Linear", layer) for index, layer in enumerate(layers)]
        self.session = a.Session(subjects, Candidate("fp8_e4m3fn"), plain_weights, lambda module, candidate: [])
        for name, db in own.items():
            self.session.measures[name] = measured(db)

    def run(self):
        session, steps = self.session, range(CALLS)
        results = [session.step(0.0, lambda step=step: [self._result(step)])[0] for step in steps]
        return [self._result(CALLS)] if session._free else [results[-1]]

    def _result(self, step):
        chosen = sorted(map(int, self.session._changed or ()))
        noise = together([layer[step] for layer in self.noises], chosen, self.cross)
        return torch.tensor([1.0, math.sqrt(noise)], dtype=torch.float64)

    def analyzed(self):
        self.session.reference(self.run)
        return a.analyze(self.session, self.run, TARGET)


def measured(db):
    measure = Measure()
    measure.add(db, db)
    measure.flops, measure.weight_db = 1, db
    return measure


@given(
    noises=st.lists(st.lists(st.one_of(FITS, FAILS), min_size=CALLS + 1, max_size=CALLS + 1), min_size=1, max_size=40),
    good=st.integers(0, 39),
    cross=st.floats(-0.3, 0.3),
)
@settings(max_examples=200, deadline=None)
def test_the_choice_holds_everywhere_or_no_layer_that_was_not_tried_is_denied(noises, good, cross):
    noises[good % len(noises)] = [0.5 * BOUND] * (CALLS + 1)
    model = Synthetic(noises, {str(index): 30.0 for index in range(len(noises))}, cross)
    found = model.analyzed()
    chosen = sorted(int(layer.name) for layer in found.chosen)
    for step in range(CALLS + 1):
        assert together([layer[step] for layer in noises], chosen, cross) <= BOUND * (1 + 1e-6)
    assert chosen or not found.complete, "a layer that holds is denied"
    assert found.trials <= MAX_TRIALS + (a.CONFIRMATIONS - 1) * RETRIALS


@given(count=st.integers(1, 50), place=st.integers(0, 49), own=st.floats(0, 40))
@example(50, 49, 10.0)
@settings(max_examples=100, deadline=None)
def test_the_one_layer_of_fifty_that_holds_is_found_whatever_was_measured_of_it(count, place, own):
    noises, _ = lonely(count, place % count)
    model = Synthetic([[noise] * (CALLS + 1) for noise in noises], {str(index): 30.0 for index in range(count)} | {str(place % count): own})
    found = model.analyzed()
    assert [layer.name for layer in found.chosen] == [str(place % count)]


def test_a_layer_that_holds_on_every_call_is_found_beside_one_that_holds_on_the_weakest_only():
    everywhere, weakest_only = [0.5 * BOUND] * 5, [0.01 * BOUND, 10.0, 0.01 * BOUND, 0.01 * BOUND, 0.01 * BOUND]
    free_fails = [0.01 * BOUND] * 4 + [10.0]
    bad = [20.0, 9.0, 9.0, 9.0, 9.0]
    for first in (weakest_only, free_fails):
        model = Synthetic([bad, first, bad, everywhere, bad], {"0": 30.0, "1": 31.0, "2": 30.0, "3": 12.0, "4": 30.0})
        assert [layer.name for layer in model.analyzed().chosen] == ["3"]


def test_one_layer_is_found_where_a_free_run_refutes_all_sets_of_two():
    holds, free_fails = [0.4 * BOUND] * 5, [0.4 * BOUND] * 4 + [100.0]
    model = Synthetic([free_fails, holds], {"0": 31.0, "1": 30.0})
    assert [layer.name for layer in model.analyzed().chosen] == ["1"]


def test_what_was_not_tried_is_not_called_impossible(monkeypatch):
    monkeypatch.setattr(a, "RETRIALS", 0)
    model = Synthetic([[10.0] * 5] * 60 + [[0.5 * BOUND] * 5], {str(index): 30.0 for index in range(60)} | {"60": 1.0})
    text = analysis_text(model.analyzed())
    assert "No layer was found" in text and "cannot be reached" not in text and "bound" in text
