// Vercel's AI SDK over OpenAI's responses API: node responses.mjs URL MODEL FEATURE prints what it gave, as JSON.
// The environment variable AI_SDK chooses the major version.
const version = process.env.AI_SDK ?? "6";
const { createOpenAI } = await import(version === "6" ? "@ai-sdk/openai" : `openai-${version}`);
const { embedMany, generateText, Output, streamText, tool, ...sdk } = await import(version === "6" ? "ai" : `ai-${version}`);
import { z } from "zod";

const [url, name, feature] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const asked = { model: provider(name), prompt: "What is 2 + 3?", maxRetries: 0 };
const user = { role: "user", content: asked.prompt };
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.int(), b: z.int() }),
  execute: async ({ a, b }) => a + b,
});
const looping = { ...asked, tools: { add }, stopWhen: sdk.stepCountIs(3) };
const summary = { openai: { reasoningSummary: "auto", forceReasoning: true } };

const features = {
  async chat() {
    const first = await generateText(asked);
    const previousResponseId = first.providerMetadata.openai.responseId;
    return (await generateText({ ...asked, providerOptions: { openai: { previousResponseId } } })).text;
  },
  async stream() {
    let text = "";
    for await (const delta of streamText(asked).textStream) text += delta;
    return text;
  },
  // The whole loop, with items that are stored on the server and with items that the client sends.
  async tools() {
    const texts = new Set();
    for (const providerOptions of [summary, { openai: { ...summary.openai, store: false } }, undefined]) {
      const answer = await generateText({ ...looping, providerOptions });
      texts.add(answer.text);
      const messages = [user, ...answer.steps.flatMap((step) => step.response.messages), user];
      const { prompt, ...others } = looping;
      const streamed = streamText({ ...others, messages, providerOptions });
      texts.add(await streamed.text);
    }
    return [...texts].join();
  },
  async structured() {
    const schema = z.object({ total: z.int(), unit: z.string() });
    return (await generateText({ ...asked, output: Output.object({ schema }) })).output;
  },
  async reasoning() {
    const first = await generateText({ ...asked, providerOptions: summary });
    const messages = [user, ...first.response.messages, user];
    const second = await generateText({ model: asked.model, messages, maxRetries: 0, providerOptions: summary });
    return [first.reasoningText, second.text];
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: provider.embeddingModel(name), values: ["one", "two"] });
    return embeddings.map((each) => each.length);
  },
};
console.log(JSON.stringify(await features[feature]()));
