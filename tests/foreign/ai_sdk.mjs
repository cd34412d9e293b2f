// Vercel's AI SDK against a server: node ai_sdk.mjs MODULES URL MODEL CASE. Prints one line of JSON, or fails.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, url, model, wanted] = process.argv.slice(2);
const require = createRequire(`${modules}/index.js`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");

const providers = {
  chat: async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "x" }).chat(model),
  responses: async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "x" }).responses(model),
  messages: async () => (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: "x" })(model),
  compatible: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "mlxr",
      baseURL: `${url}/v1`,
      apiKey: "x",
      supportsStructuredOutputs: true,
    })(model),
};
const cases = {
  text: async (model) => {
    const reply = await generateText({ model, prompt: "Say hi.", maxOutputTokens: 8 });
    return { text: reply.text, tokens: reply.usage.outputTokens };
  },
  stream: async (model) => {
    const kinds = [];
    let text = "";
    const { fullStream } = streamText({ model, prompt: "Say hi.", maxOutputTokens: 8 });
    for await (const part of fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
      kinds.push(part.type);
    }
    return { text, kinds };
  },
  object: async (model) => {
    const schema = z.object({ city: z.enum(["Paris", "Rome"]), people: z.number().int().min(1).max(9) });
    return (await generateObject({ model, schema, prompt: "Name a city." })).object;
  },
  call: async (model) => {
    const seen = [];
    const tools = {
      weather: tool({
        description: "The weather of a city.",
        inputSchema: z.object({ city: z.enum(["Paris"]) }),
        execute: async (input) => (seen.push(input), "It rains."),
      }),
    };
    const reply = await generateText({
      model,
      tools,
      toolChoice: "required",
      prompt: "What is the weather in Paris?",
      maxOutputTokens: 60,
      stopWhen: stepCountIs(2),
    });
    return { seen, steps: reply.steps.map((step) => step.finishReason) };
  },
  "call-stream": async (model) => {
    const kinds = [];
    const tools = { weather: tool({ description: "The weather.", inputSchema: z.object({ city: z.enum(["Paris"]) }) }) };
    const { fullStream } = streamText({
      model,
      tools,
      toolChoice: "required",
      prompt: "What is the weather in Paris?",
      maxOutputTokens: 60,
    });
    for await (const part of fullStream) {
      if (part.type === "error") throw part.error;
      kinds.push(part.type);
    }
    return { kinds };
  },
};
const [provider, name] = wanted.split("/");
console.log(JSON.stringify(await cases[name](await providers[provider]())));
