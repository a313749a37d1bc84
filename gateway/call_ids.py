"""The ids of function calls, under which a client gives their results back."""

from hashlib import sha256

from pdserve.gateway.generation_plan import GenerationPlan

_SHORT = 9  # what Mistral's templates take: nine letters or digits


def call_id(plan: GenerationPlan, choice: int, call: int, prefix: str = "call_") -> str:
    """Return the id of one call, another one for each call of any answer, and the same whenever it is asked for."""
    digest = sha256(f"{plan.response_id}/{choice}/{call}".encode()).hexdigest()
    return digest[:_SHORT] if plan.reading.has_short_call_ids else prefix + digest[:24]
