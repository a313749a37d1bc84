"""The output items of a response as they grow: reasoning, messages, function calls, and the events that tell them."""

from typing import Any

from pdserve.gateway.answer_part import AnswerPart, CallArguments, CallOpened, Said, Thought
from pdserve.gateway.call_ids import call_id
from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.other_reply_types import OutputText
from pdserve.gateway.reply_types import TokenWithTop

Event = tuple[str, dict[str, Any]]


class ResponseItems:
    """Each part of an answer -> events. `finished` are the items that are complete; the last one may still be open."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._stem = plan.response_id.removeprefix("resp_")
        self.finished: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenWithTop] = []  # of the open item
        self._new_logprobs: list[TokenWithTop] = []  # of text that is told next

    def add_logprobs(self, entries: list[TokenWithTop]) -> None:
        """Take the logprobs of tokens whose text is pushed next; those of calls and thoughts are not shown."""
        self._new_logprobs += entries

    def push(self, part: AnswerPart) -> list[Event]:
        """Return the events that `part` makes; an item ends where another one begins."""
        match part:
            case Said(text):
                begun = self._continued("message")
                self._texts.append(text)
                logprobs, self._new_logprobs = self._new_logprobs, []
                self._logprobs += logprobs
                return [*begun, self._event("output_text.delta", **self._content(), delta=text, logprobs=logprobs)]
            case Thought(text):
                begun = self._continued("reasoning")
                self._texts.append(text)
                self._new_logprobs = []
                return [*begun, self._event("reasoning_text.delta", **self._content(), delta=text)]
            case CallOpened(index, name):
                call = {"call_id": call_id(self._plan, 0, index), "name": name, "arguments": ""}
                return [*self.close("completed"), *self._begin("function_call", **call)]
            case CallArguments(_, text):
                self._texts.append(text)
                self._new_logprobs = []
                return [self._event("function_call_arguments.delta", **self._place(), delta=text)]

    def close(self, status: str) -> list[Event]:
        """Return the events that end the open item, if there is one."""
        if self._item is None:
            return []
        text, kind = "".join(self._texts), self._item["type"]
        place = self._place()
        if kind == "function_call":
            self._item |= {"arguments": text}
            events = [self._event("function_call_arguments.done", **place, name=self._item["name"], arguments=text)]
        elif kind == "reasoning":
            thought = {"type": "reasoning_text", "text": text}
            self._item |= {"content": [thought]}
            events = [
                self._event("reasoning_text.done", **self._content(), text=text),
                self._event("content_part.done", **self._content(), part=thought),
            ]
        else:
            part = _text_part(text, [*self._logprobs, *self._new_logprobs])  # the last token has no text
            self._item |= {"content": [part]}
            events = [
                self._event("output_text.done", **self._content(), text=text, logprobs=part["logprobs"]),
                self._event("content_part.done", **self._content(), part=part),
            ]
        self._item |= {"status": status}
        events.append(self._event("output_item.done", output_index=len(self.finished), item=self._item))
        self.finished.append(self._item)
        self._item, self._texts, self._logprobs, self._new_logprobs = None, [], [], []
        return events

    def finish(self, status: str) -> list[Event]:
        """Return the last events; an answer of nothing is an empty message."""
        begun = [] if self.finished or self._item is not None else self._continued("message")
        return [*begun, *self.close(status)]

    def _continued(self, kind: str) -> list[Event]:
        if self._item is not None and self._item["type"] == kind:
            return []
        fields: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _text_part("", [])
        events = [*self.close("completed"), *self._begin(kind, **fields, content=[])]
        return [*events, self._event("content_part.added", **self._content(), part=part)]

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        number = len(self.finished)
        item_id = f"{prefix}_{self._stem}_{number}" if number else f"{prefix}_{self._stem}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        return [self._event("output_item.added", output_index=number, item=dict(self._item))]

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.finished)}

    def _content(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> Event:
        return f"response.{name}", fields


def _text_part(text: str, logprobs: list[TokenWithTop]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
