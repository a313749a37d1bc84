from dataclasses import fields, replace

from pdserve.engine.sampling_params import SamplingParams


def test_what_nodes_are_told_differs_in_seed_and_stop_strings_only() -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        logit_bias={5: -1.0},  # type: ignore[arg-type]  # a mapping is taken too
        allowed_token_ids=(5, 6),
        bad_words_ids=((1, 2),),
        n=1,
        best_of=2,
        priority=3,
    )

    dispatched = sampling.dispatched(11)

    assert dispatched == replace(sampling, seed=11, stop=())
    assert sampling.seed is None and sampling.stop == ("a", "b")
    assert set(SamplingParams.__slots__) == {field.name for field in fields(SamplingParams)}


def test_the_branch_of_a_single_choice_is_the_sampling_itself_and_others_differ_in_their_seed() -> None:
    sampling = SamplingParams(max_tokens=7, seed=5)

    assert sampling.branch(0, max_tokens=7, stop=()) is sampling
    assert sampling.branch(0, max_tokens=6) == replace(sampling, max_tokens=6)
    assert sampling.branch(1).seed not in (None, 5)
