// The official JavaScript client against a running system: node check.mjs URL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const fixed = { model, messages: [{ role: "user", content: "Name three colours." }], temperature: 0, max_tokens: 12 };

const whole = await client.chat.completions.create(fixed);
let text = "";
let usage = null;
const stream = await client.chat.completions.create({ ...fixed, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.notEqual(text, "");
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const gathered = await client.chat.completions.stream(fixed).finalChatCompletion();
assert.equal(gathered.choices[0].message.content, text);
assert.equal(gathered.choices[0].finish_reason, whole.choices[0].finish_reason);

const response = await client.responses.create({ model, input: "Name three colours.", temperature: 0, max_output_tokens: 12 });
assert.notEqual(response.output_text, "");

await assert.rejects(client.chat.completions.create({ ...fixed, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  assert.match(error.message, /temperature/);
  return true;
});
await assert.rejects(client.chat.completions.create({ ...fixed, model: "nope" }), OpenAI.NotFoundError);

const leaving = await client.chat.completions.create({ ...fixed, max_tokens: 4000, stream: true });
for await (const chunk of leaving) {
  if (chunk.choices[0]?.delta?.content) break; // the client closes the connection
}
console.log(`openai-node ${VERSION}: 6 checks hold`);
