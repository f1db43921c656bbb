"""CompileConfig and BucketConfig: what they take, what they refuse and in which words, dicts, the environment."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from pytest_torchcompile import BucketConfig, CompileConfig
from pytest_torchcompile.layer.config import _VARIABLES


def my_backend(graph, inputs):
    return graph.forward


def test_the_defaults_are_those_of_torch_and_disabled():
    assert dataclasses.asdict(CompileConfig()) == {
        "enabled": False, "mode": "default", "dynamic": None, "backend": "inductor", "fullgraph": False,
        "options": None, "allowlist": (), "blocklist": (), "healthcheck": True, "fail_policy": "fallback_eager",
        "smoketest_steps": 3, "blocklist_recursive": True, "min_speedup": None,
    }  # fmt: skip
    assert CompileConfig().settings() == {"backend": "inductor", "dynamic": None, "fullgraph": False}


def test_frozen_and_hashable_and_picklable():
    config = CompileConfig(options={"max_autotune": True}, allowlist=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "default"
    assert config == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config)
    assert len({config, copy.deepcopy(config)}) == 1
    assert config.allowlist == ("a",)


@pytest.mark.parametrize(("given", "settings"), [
    ({"mode": "max-autotune"}, {"mode": "max-autotune"}),
    ({"mode": "max-autotune", "backend": "aot_eager"}, {}),  # torch would drop it there, with a warning
    ({"mode": "max-autotune", "backend": my_backend}, {"mode": "max-autotune"}),
    ({"options": {"max_autotune": True}}, {"options": {"max_autotune": True}}),
    ({"options": {}, "mode": "max-autotune"}, {"mode": "max-autotune"}),
    ({"dynamic": True, "fullgraph": True}, {}),
])  # fmt: skip
def test_settings_are_the_arguments_of_torch_compile(given, settings):
    config = CompileConfig(**given)
    expected = {"backend": config.backend, "dynamic": config.dynamic, "fullgraph": config.fullgraph} | settings
    assert config.settings() == expected


def test_torch_may_take_keys_out_of_the_options():
    config = CompileConfig(options={"use_aoti": False})
    config.settings()["options"].pop("use_aoti")
    assert config.settings()["options"] == {"use_aoti": False}


def test_a_backend_is_looked_up(monkeypatch, tmp_path):
    (tmp_path / "wrap_backends.py").write_text("def mine(graph, inputs): ...\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = CompileConfig(backend="wrap_backends:mine").settings()["backend"]
    assert found.__name__ == "mine"
    for name, text in [("wrap_backends:other", "cannot be looked up"), ("no_such_module:x", "cannot be looked up"),
                       ("wrap_backends:number", "is of type int; expected something callable")]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            CompileConfig(backend=name).settings()


@pytest.mark.parametrize(("given", "text"), [
    ({"enabled": 1}, "enabled=1: expected True or False"),
    ({"fullgraph": None}, "fullgraph=None: expected True or False"),
    ({"blocklist_recursive": None}, "blocklist_recursive=None: expected True or False"),
    ({"healthcheck": "yes"}, "healthcheck='yes': expected True or False"),
    ({"mode": "max-autotun"}, "mode='max-autotun': did you mean 'max-autotune'? Known: default, max-autotune, "),
    ({"mode": None}, "mode=None: expected 'default', "),
    ({"dynamic": "auto"}, "dynamic='auto': expected None, True or False"),
    ({"dynamic": 1}, "dynamic=1: expected None, True or False"),
    ({"fail_policy": "fallback"}, "fail_policy='fallback': did you mean 'fallback_eager'? Known: fallback_eager, ra"),
    ({"smoketest_steps": 0}, "smoketest_steps=0: expected 1, 2 or 3"),
    ({"smoketest_steps": True}, "smoketest_steps=True: expected 1, 2 or 3"),
    ({"backend": "inducter"}, "backend='inducter': no such backend is registered; did you mean 'inductor'? Known: "),
    ({"backend": 3}, "backend=3: expected a name, module:attribute, or something callable"),
    ({"backend": "invoke_subgraph"}, "backend='invoke_subgraph': it needs arguments that only torch gives it"),
    ({"mode": "max-autotune", "options": {"a": 1}}, "mode='max-autotune' and options={'a': 1}: torch.compile takes one "
                                                    "or the other"),
    ({"options": ["a"]}, "options=['a']: expected a mapping of option names to values"),
    ({"options": {1: 2}}, "options={1: 2}: expected a mapping of option names to values"),
    ({"allowlist": "layers.*"}, "allowlist='layers.*': expected a list of patterns"),
    ({"blocklist": 3}, "blocklist=3: expected a list of patterns"),
    ({"blocklist": ["a", ""]}, "blocklist=('a', ''): '' is no pattern"),
    ({"allowlist": ["a", "b"], "blocklist": ["b"]}, "allowlist and blocklist both have 'b'"),
])  # fmt: skip
def test_mistakes_name_the_field_the_value_and_what_is_allowed(given, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the text is what is tested
        CompileConfig(**given)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("config", [
    CompileConfig(), CompileConfig(enabled=True, mode="reduce-overhead", dynamic=False, allowlist=("a", "B*")),
    CompileConfig(options={"shape_padding": True}, backend=f"{__name__}:my_backend"),
])  # fmt: skip
def test_dicts_and_back(config):
    plain = json.loads(json.dumps(config.to_dict()))
    assert CompileConfig.from_dict(plain) == config


def test_a_backend_in_a_dict_is_a_name_that_leads_back_to_it():
    from fnmatch import fnmatch

    assert CompileConfig(backend=fnmatch).to_dict()["backend"] == "fnmatch:fnmatch"
    with pytest.raises(ValueError, match="has no name as module:attribute that leads back to it; put it at the top"):
        CompileConfig(backend=lambda graph, inputs: graph).to_dict()


@pytest.mark.parametrize("config", [CompileConfig, BucketConfig])
def test_unknown_keys_are_refused_with_the_nearest_known(config):
    for known in config.from_dict({}).to_dict():
        with pytest.raises(ValueError, match=rf"{config.__name__} has no field '{known}x'; did you mean '{known}'\?"):
            config.from_dict({f"{known}x": 1})
    with pytest.raises(ValueError, match="found list, expected a mapping of its fields"):
        config.from_dict([])


def test_every_field_can_be_set_from_the_environment():
    assert _VARIABLES["compile"].keys() == CompileConfig().to_dict().keys()
    assert _VARIABLES["buckets"].keys() == BucketConfig().to_dict().keys()
    given = {"ENABLED": "1", "MODE": "reduce-overhead", "DYNAMIC": "static", "BACKEND": "inductor", "FULLGRAPH": "Yes",
             "ALLOWLIST": "layers.*, Attention", "BLOCKLIST": "head", "HEALTHCHECK": "off", "FAIL_POLICY": "raise",
             "SMOKETEST_STEPS": "2", "BLOCKLIST_RECURSIVE": "no", "BUCKETS": "16,32", "PAD_TOKEN_ID": "7"}  # fmt: skip
    environment = {f"TORCHCOMPILE_{name}": text for name, text in given.items()} | {"HOME": "/"}
    assert CompileConfig.from_env(environment) == CompileConfig(
        True, "reduce-overhead", False, "inductor", True, None, ("layers.*", "Attention"), ("head",), False, "raise", 2,
        False)
    assert BucketConfig.from_env(environment) == BucketConfig((16, 32), 7)
    assert CompileConfig.from_env({"TORCHCOMPILE_OPTIONS": '{"max_autotune": true}'}).options == {"max_autotune": True}
    assert CompileConfig.from_env({"TORCHCOMPILE_ENABLED": "", "TORCHCOMPILE_OPTIONS": " "}) == CompileConfig()


@pytest.mark.parametrize(("word", "value"), [("auto", None), ("none", None), ("static", False), ("False", False),
                                             ("dynamic", True), ("TRUE", True)])  # fmt: skip
def test_dynamic_has_the_words_of_a_matrix_and_those_of_torch(word, value):
    assert CompileConfig.from_env({"TORCHCOMPILE_DYNAMIC": word}).dynamic is value


def test_the_environment_of_the_process_is_read(monkeypatch):
    monkeypatch.setenv("TORCHCOMPILE_ENABLED", "true")
    assert CompileConfig.from_env().enabled


@pytest.mark.parametrize(("name", "text", "message"), [
    ("ENABLED", "si", "TORCHCOMPILE_ENABLED='si': expected 1, true, yes, on, 0, false, no, off"),
    ("SMOKETEST_STEPS", "two", "TORCHCOMPILE_SMOKETEST_STEPS='two': expected a whole number"),
    ("DYNAMIC", "maybe", "TORCHCOMPILE_DYNAMIC='maybe': expected auto, static, dynamic, none, true, false"),
    ("OPTIONS", "[1]", r"TORCHCOMPILE_OPTIONS='\[1\]': expected a JSON object"),
    ("OPTIONS", "{a}", "TORCHCOMPILE_OPTIONS='{a}': expected a JSON object"),
    ("MODUS", "default", r"unknown environment variable TORCHCOMPILE_MODUS; did you mean 'TORCHCOMPILE_MODE'\? Know"),
])  # fmt: skip
def test_mistakes_in_the_environment(name, text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        CompileConfig.from_env({f"TORCHCOMPILE_{name}": text})
    if name == "MODUS":
        with pytest.raises(ValueError, match=message):
            BucketConfig.from_env({f"TORCHCOMPILE_{name}": text})


def test_mistakes_in_lengths():
    with pytest.raises(ValueError, match="TORCHCOMPILE_BUCKETS='a,b': expected lengths separated by commas"):
        BucketConfig.from_env({"TORCHCOMPILE_BUCKETS": "a,b"})
