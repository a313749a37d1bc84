// What a web page does: fetch a stream through the proxy and read it as it comes. node fetch.mjs URL
import assert from "node:assert/strict";

const base = process.argv[2];
const model = (await (await fetch(base + "/v1/models")).json()).data[0].id;
const body = { model, prompt: "Once upon a time", max_tokens: 96, temperature: 0, ignore_eos: true, stream: true };
const response = await fetch(base + "/v1/completions", {
  method: "POST",
  headers: { "Content-Type": "application/json", Origin: "http://page.example" },
  body: JSON.stringify(body),
});
assert.equal(response.status, 200);
assert.match(response.headers.get("content-type"), /^text\/event-stream/);

const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
const arrivals = [];
let text = "";
for (let part = await reader.read(); !part.done; part = await reader.read()) {
  text += part.value;
  arrivals.push(performance.now());
}
const events = text.split("\n\n").filter((event) => event.startsWith("data: {"));
assert.ok(text.endsWith("data: [DONE]\n\n"));
assert.ok(events.length > 48, `${events.length} events`);
// Buffered, everything would arrive in one or two reads at the end.
assert.ok(arrivals.length > events.length / 3, `${events.length} events in ${arrivals.length} reads`);
console.log(`${events.length} events in ${arrivals.length} reads`);
