"""What editors and type checkers are told of `generate`, `score` and `Sampling`."""

import inspect
import typing

import pytest

from kvjax.engine.sampling import OneSample, Sampling, SamplingOptions
from kvjax.generation import generate
from kvjax.scheduler.request import Completion
from kvjax.scheduler.scoring import Score, score


def test_options_are_the_fields_of_sampling():
    fields = inspect.signature(Sampling).parameters
    assert list(fields) == list(inspect.signature(Sampling.__init__).parameters)[1:], "a notebook shows the fields"
    assert set(SamplingOptions.__annotations__) == set(fields)
    assert set(OneSample.__annotations__) == set(fields) - {"n"}
    assert not SamplingOptions.__required_keys__


def test_options_have_the_types_of_the_fields():
    told, held = typing.get_type_hints(SamplingOptions), typing.get_type_hints(Sampling)
    wider = {"stop", "stop_token_ids"}  # one string, and lists, become tuples
    assert {name: told[name] for name in set(told) - wider} == {name: held[name] for name in set(held) - wider}


@pytest.mark.parametrize(
    ("function", "returns"),
    [(generate, [str, Completion, list[str], list[Completion], typing.Any]), (score, [Score, list[Score], typing.Any])],
)
def test_what_comes_back_is_known_from_what_is_given(function, returns):
    overloads = typing.get_overloads(function)
    assert [typing.get_type_hints(each)["return"] for each in overloads] == returns
    taken = list(inspect.signature(function).parameters)
    for each in overloads:
        names = [name for name in inspect.signature(each).parameters if name != "sampling"]
        assert names + (list(inspect.signature(Sampling).parameters) if function is generate else []) == taken


def test_a_notebook_completes_sampling_options():
    from kvjax.models import CausalLM

    for shown in (inspect.signature(generate), inspect.signature(CausalLM.generate)):
        assert {"temperature", "stop", "n", "policy", "on_error"} <= set(shown.parameters)
        assert shown.parameters["max_new_tokens"].default == Sampling().max_new_tokens


@pytest.mark.parametrize("call", [lambda: generate("needle", "text"), lambda: score("needle", "text", " more")])
def test_a_name_is_not_a_model(call):
    with pytest.raises(ValueError, match=r"kvjax\.(generate|score)\(kvjax\.load\('needle'\), \.\.\.\)"):
        call()
