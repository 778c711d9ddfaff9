// Vercel's AI SDK: node ai.mjs URL MODEL FEATURE prints what the feature gave, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, feature] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "folio",
  baseURL: `${url}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const asked = { model: provider(name), prompt: "What is 2 + 3?", maxRetries: 0 };

const features = {
  async chat() {
    return (await generateText(asked)).text;
  },
  async stream() {
    let text = "";
    for await (const delta of streamText(asked).textStream) text += delta;
    return text;
  },
  async tools() {
    const add = tool({
      description: "Add two numbers.",
      inputSchema: z.object({ a: z.int(), b: z.int() }),
      execute: async ({ a, b }) => a + b,
    });
    const answer = await generateText({ ...asked, tools: { add }, stopWhen: stepCountIs(3) });
    return answer.text;
  },
  async structured() {
    const schema = z.object({ total: z.int(), unit: z.string() });
    return (await generateText({ ...asked, output: Output.object({ schema }) })).output;
  },
  async reasoning() {
    const first = await generateText(asked);
    const user = { role: "user", content: asked.prompt };
    const messages = [user, ...first.response.messages, user];
    const second = await generateText({ model: asked.model, messages, maxRetries: 0 });
    return [first.reasoningText, second.text];
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: provider.embeddingModel(name), values: ["one", "two"] });
    return embeddings.map((each) => each.length);
  },
};
console.log(JSON.stringify(await features[feature]()));
