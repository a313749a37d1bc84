"""The systems that can be compared, by name: ours, and peers with the settings that are tried.

A name is a family, for some a type of the weights, and options in any order: `llamacpp-q8_0-unified-b256`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from peers.environments import demo_gguf, demo_model_dir, is_installed, peer_python, peer_version
from systems import System

_HERE = Path(__file__).parent
_THREADS = 2
_SLOTS = {"W1": 1, "W2": 1, "W3": 16, "W4": 9, "W5": 1, "W6": 16}
_LLAMACPP_CONTEXT = {"W1": 2_048, "W2": 8_192, "W3": 16 * 512, "W4": 9 * 3_072, "W5": 4_096, "W6": 16 * 2_048}
_TTFT_2000 = ("--dtype", "auto", "--ttft-target-ms", "2000")
_TTFT_450 = ("--dtype", "auto", "--ttft-target-ms", "450")

OURS = {
    "pdserve": ("--dtype", "auto"),
    "pdserve-float32": ("--dtype", "float32"),
    "pdserve-alike": ("--dtype", "auto", "--prefill-niceness", "0"),
    "pdserve-unshared": ("--dtype", "auto", "--no-share-cores"),
    "pdserve-tpot40": ("--dtype", "auto", "--tpot-target-ms", "40"),
    "pdserve-tpot100": ("--dtype", "auto", "--tpot-target-ms", "100"),
    "pdserve-tpot150": ("--dtype", "auto", "--tpot-target-ms", "150"),
    "pdserve-local256": ("--dtype", "auto", "--tpot-target-ms", "40", "--min-disaggregated-tokens", "256"),
    "pdserve-local256-tpot100": ("--dtype", "auto", "--tpot-target-ms", "100", "--min-disaggregated-tokens", "256"),
    "pdserve-slo2000-100": (*_TTFT_2000, "--tpot-target-ms", "100", "--min-disaggregated-tokens", "256"),
    "pdserve-slo450-40": (*_TTFT_450, "--tpot-target-ms", "40", "--min-disaggregated-tokens", "256"),
    "pdserve-colocated": ("--dtype", "auto", "--prefill-nodes", "0"),
    "pdserve-colocated-b128": ("--dtype", "auto", "--prefill-nodes", "0", "--max-num-batched-tokens", "128"),
    "pdserve-colocated-tpot40": ("--dtype", "auto", "--prefill-nodes", "0", "--tpot-target-ms", "40"),
    "pdserve-colocated-slo2000-100": (*_TTFT_2000, "--tpot-target-ms", "100", "--prefill-nodes", "0"),
    "pdserve-colocated-slo450-40": (*_TTFT_450, "--tpot-target-ms", "40", "--prefill-nodes", "0"),
}
TYPES = {
    "llamacpp": ("q8_0", "f16", "f32"),
    "transformers": ("generate", "continuous"),
    "ctranslate2": ("int8", "float32"),
    "vllm": ("float32", "bfloat16"),
}
# What somebody would try; the options of one line exclude each other. Tuning goes through them line by line.
_BATCH = {f"b{size}": {"batch": size} for size in (256, 512, 1_024, 2_048)}
_SPIN = {"spin": {"passive": False}}
OPTIONS: Mapping[str, tuple[Mapping[str, Mapping[str, object]], ...]] = {
    "llamacpp": (
        {"unified": {"unified": True}},
        {name: {**value, "ubatch": value["batch"]} for name, value in _BATCH.items()},
        {"nopoll": {"poll": False}},
        {"noram": {"cache_ram": False}},
        {"t1": {"threads": 1}},
    ),
    "transformers": (_SPIN,),
    "ctranslate2": (_SPIN,),
    "vllm": ({**_BATCH, "b8192": {"batch": 8_192}}, {"nopreload": {"preload": False}}),
}
_PLAIN: Mapping[str, Mapping[str, object]] = {
    "llamacpp": {"unified": False, "batch": 2_048, "ubatch": 512, "poll": True, "cache_ram": True},
    "transformers": {"batch": 16, "passive": True},
    "ctranslate2": {"batch": 16, "passive": True},
    "vllm": {"batch": 2_048, "preload": True},
}


def known_names() -> list[str]:
    """Return the names that `system_of` takes, without the options."""
    return [*OURS, *(f"{family}-{kind}" for family in TYPES for kind in TYPES[family])]


def family_of(name: str) -> str:
    """Return the family that a name begins with."""
    return name.partition("-")[0]


def axes_of(family: str) -> list[list[str]]:
    """Return what tuning tries, line by line: the names to begin with, then options to append."""
    if family not in TYPES:
        raise SystemExit(f"{family!r} cannot be tuned; these can: {', '.join(TYPES)}")
    return [[f"{family}-{kind}" for kind in TYPES[family]], *(list(line) for line in OPTIONS[family])]


def is_available(name: str) -> bool:
    """Return whether a system can be started: ours always, a peer if it is installed."""
    return name in OURS or is_installed(family_of(name))


def check_name(name: str) -> None:
    """Refuse a system that cannot be started, without starting or making anything.

    Raises:
        SystemExit: there is no such system, or its environment is not installed.
    """
    if name not in OURS:
        family, _, _ = _parsed(name)
        peer_python(family)


def system_of(name: str, workload: str, options: tuple[str, ...] = ()) -> System:
    """Return the system called `name`, set for `workload`; `options` are added to ours.

    Raises:
        SystemExit: there is no such system, or its environment is not installed.
    """
    if name in OURS:
        pdserve = Path(sys.executable).with_name("pdserve")
        flags = (*OURS[name], *options)
        return System(name, (str(pdserve), "serve", "--port", "0", *flags), " ".join(("pdserve serve", *flags)))
    family, kind, chosen = _parsed(name)
    settings: dict[str, object] = {"threads": _THREADS, **_PLAIN[family]}
    for option in chosen:
        settings |= option
    return _PEERS[family](name, kind, settings, workload)


def _parsed(name: str) -> tuple[str, str, list[Mapping[str, object]]]:
    """Return what a peer's name says: family, type, and the settings of each option."""
    family, *words = name.split("-")
    if family not in TYPES:
        raise SystemExit(f"{name!r} is no system; known are {', '.join(known_names())}")
    kind, *chosen = words or TYPES[family][:1]
    known = {option: value for line in OPTIONS[family] for option, value in line.items()}
    if kind not in TYPES[family] or not set(chosen) <= set(known):
        raise SystemExit(f"{name!r}: {family}-TYPE[-OPTION...] with {TYPES[family]} and {tuple(known)}")
    return family, kind, [known[option] for option in chosen]


def _llamacpp(name: str, kind: str, settings: dict[str, object], workload: str) -> System:
    settings |= {"slots": _SLOTS[workload], "context": _LLAMACPP_CONTEXT[workload]}
    return _peer(name, "llamacpp_server.py", str(demo_gguf(kind.upper())), {"type": kind.upper()}, settings)


def _library(name: str, kind: str, settings: dict[str, object], workload: str) -> System:
    if kind == "continuous":
        own = {"type": "float32", "step_tokens": 512}
        return _peer(name, "continuous_batch_server.py", str(demo_model_dir()), own, settings)
    own = {"backend": family_of(name), "type": "float32" if kind == "generate" else kind}
    return _peer(name, "static_batch_server.py", str(demo_model_dir()), own, settings)


def _vllm(name: str, kind: str, settings: dict[str, object], workload: str) -> System:
    own = {"dtype": kind, "sequences": 64 if workload == "W6" else _SLOTS[workload]}
    # Reading its modules and compiling takes minutes on two cores.
    return _peer(name, "vllm_server.py", str(demo_model_dir()), own, settings, start_timeout_s=900.0)


_PEERS = {"llamacpp": _llamacpp, "transformers": _library, "ctranslate2": _library, "vllm": _vllm}


def _peer(
    name: str,
    script: str,
    model: str,
    own: dict[str, object],
    settings: dict[str, object],
    start_timeout_s: float = 180.0,
) -> System:
    family = family_of(name)
    text = json.dumps({**own, **settings})
    environment = {"OMP_NUM_THREADS": str(settings["threads"])}
    if settings.get("passive"):  # teams that spin come to a standstill where others want their cores
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    command = (str(peer_python(family)), str(_HERE / script), model, text)
    return System(name, command, f"{peer_version(family)}, {text}", start_timeout_s, environment)
