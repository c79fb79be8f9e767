// openai-node: models, completions, chats, tools, schemas, responses, errors, streams left early.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "EMPTY", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour." }];
const schema = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "pick", parameters: schema } }];

const listed = [];
for await (const each of client.models.list()) listed.push(each.id);
assert.ok(listed.includes(model));
assert.equal((await client.models.retrieve(model)).id, model);

const plain = { model, prompt: "One two", max_tokens: 8, temperature: 0 };
const whole = await client.completions.create(plain);
let text = "";
for await (const chunk of await client.completions.create({ ...plain, stream: true })) text += chunk.choices[0].text;
assert.equal(text, whole.choices[0].text);

const chat = { model, messages, max_tokens: 8, temperature: 0 };
const answer = await client.chat.completions.create(chat);
const streamed = await client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } }).finalChatCompletion();
assert.equal(streamed.choices[0].message.content, answer.choices[0].message.content);
assert.equal(streamed.usage.total_tokens, answer.usage.total_tokens);

const called = await client.chat.completions
  .stream({ ...chat, max_tokens: 100, tools, tool_choice: "required" })
  .finalChatCompletion();
const call = called.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "pick");
assert.ok(["red", "blue"].includes(JSON.parse(call.function.arguments).colour));

const structured = await client.chat.completions.parse({
  ...chat,
  max_tokens: 100,
  response_format: { type: "json_schema", json_schema: { name: "pick", schema, strict: true } },
});
assert.ok(["red", "blue"].includes(JSON.parse(structured.choices[0].message.content).colour));

const format = { type: "json_schema", name: "pick", schema, strict: true };
const asked = { model, input: "Name a colour.", text: { format }, max_output_tokens: 100, temperature: 0 };
const response = await client.responses.create(asked);
const events = client.responses.stream(asked);
assert.equal((await events.finalResponse()).output_text, response.output_text);

await assert.rejects(client.chat.completions.create({ ...chat, model: "no-such-model" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), OpenAI.BadRequestError);

const left = await client.chat.completions.create({ ...chat, max_tokens: 2000, stream: true, ignore_eos: true });
for await (const chunk of left) {
  if (chunk.choices[0].delta.content) break;
}
left.controller.abort();
