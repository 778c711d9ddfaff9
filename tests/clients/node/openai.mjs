// The official client for Node: node openai.mjs URL MODEL FEATURE prints what the feature gave, as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, feature] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const user = { role: "user", content: "What is 2 + 3?" };
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
const chat = (fields) => client.chat.completions.create({ model, messages: [user], ...fields });

const features = {
  async chat() {
    return (await chat()).choices[0].message.content;
  },
  async stream() {
    const stream = client.chat.completions.stream({ model, messages: [user] });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    return text;
  },
  async tools() {
    const add = { name: "add", description: "Add two numbers.", parameters, parse: JSON.parse };
    const runner = client.chat.completions.runTools({
      model,
      messages: [user],
      tools: [{ type: "function", function: { ...add, function: ({ a, b }) => String(a + b) } }],
    });
    return await runner.finalContent();
  },
  async structured() {
    const format = zodResponseFormat(z.object({ total: z.int(), unit: z.string() }), "total");
    const answer = await client.chat.completions.parse({ model, messages: [user], response_format: format });
    return answer.choices[0].message.parsed;
  },
  async reasoning() {
    const { message } = (await chat()).choices[0];
    const next = await chat({ messages: [user, message, user] });
    return [message.reasoning_content, next.choices[0].message.content];
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ["one", "two"] });
    return answer.data.map((each) => each.embedding.length);
  },
};
console.log(JSON.stringify(await features[feature]()));
