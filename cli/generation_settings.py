"""The settings of `pdserve generate` alone: sampling, and files of prompts."""

from dataclasses import dataclass

from pdserve.cli import value_types
from pdserve.cli.setting_spec import GENERATE, Group, setting


@dataclass(frozen=True, kw_only=True)  # no slots: `Settings` has another base with some, and Python allows one
class GenerationSettings:
    """How `pdserve generate` samples, and where from and where to."""

    max_tokens: int = setting(
        128, value_types.whole(1), Group.SAMPLING, GENERATE, "most tokens to generate for each prompt"
    )
    temperature: float = setting(
        0.0, value_types.number(0, 2), Group.SAMPLING, GENERATE, "0 always takes the most likely token"
    )
    top_p: float = setting(
        1.0,
        value_types.number(0, 1),
        Group.SAMPLING,
        GENERATE,
        "sample from the most likely tokens up to this mass",
    )
    top_k: int = setting(
        0,
        value_types.whole(0),
        Group.SAMPLING,
        GENERATE,
        "sample from this many most likely tokens; 0 is all",
    )
    seed: int | None = setting(
        None, value_types.whole(0), Group.SAMPLING, GENERATE, "the same seed gives the same tokens again"
    )
    chat: bool = setting(
        True,
        value_types.switch(),
        Group.SAMPLING,
        GENERATE,
        "put the prompt through the model's chat template, if it has one",
    )
    min_p: float = setting(
        0.0, value_types.number(0, 1), Group.SAMPLING, GENERATE, "least probability, as a part of the likeliest token's"
    )
    min_tokens: int = setting(
        0, value_types.whole(0), Group.SAMPLING, GENERATE, "fewest tokens before the end or a stop string counts"
    )
    repetition_penalty: float = setting(
        1.0,
        value_types.number(0.01, 10),
        Group.SAMPLING,
        GENERATE,
        "divides the scores of tokens that prompt or output have; 1 is off",
    )
    presence_penalty: float = setting(
        0.0, value_types.number(-2, 2), Group.SAMPLING, GENERATE, "taken from the scores of tokens that the output has"
    )
    frequency_penalty: float = setting(
        0.0, value_types.number(-2, 2), Group.SAMPLING, GENERATE, "the same, for each time that the output has them"
    )
    stop: tuple[str, ...] = setting(
        (), value_types.texts(), Group.SAMPLING, GENERATE, "end before the first of these texts"
    )
    ignore_eos: bool = setting(
        False, value_types.switch(), Group.SAMPLING, GENERATE, "go on after the model's end of sequence"
    )
    logprobs: int | None = setting(
        None,
        value_types.whole(0, 20),
        Group.SAMPLING,
        GENERATE,
        "with --output: the logprob of each token and of so many likeliest ones",
    )
    input: str | None = setting(
        None,
        value_types.text(),
        Group.SAMPLING,
        GENERATE,
        "file with a prompt a line, as JSON: a text, or an object with prompt, prompt_token_ids or messages, and "
        "sampling of its own",
    )
    output: str | None = setting(
        None,
        value_types.text(),
        Group.SAMPLING,
        GENERATE,
        "file for the answers to --input, one JSON object a line; what it already has is not computed again",
    )
