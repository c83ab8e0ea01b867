// Asks a server through the AI SDK: `node ask.mjs URL MODEL WHAT` prints as JSON what a user of the SDK sees.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, what] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "raydix",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);

const river = z.strictObject({
  name: z.enum(["Danube", "Dnipro", "Rhine"]),
  continent: z.enum(["Africa", "Europe"]),
  is_long: z.boolean(),
});
const query = z.strictObject({ city: z.enum(["Kyiv", "Lima", "Oslo"]), days: z.literal([1, 3, 7]) });
const weather = tool({
  description: "Ask for the weather in a city.",
  inputSchema: query,
  execute: async ({ city, days }) => ({ city, days, report: "It will be sunny." }),
});

const common = { model, maxRetries: 0, temperature: 0, abortSignal: AbortSignal.timeout(120_000) };
const words = { ...common, prompt: "Name three rivers of Europe.", maxOutputTokens: 32 };
const forms = { ...common, prompt: "Name a river of Europe.", maxOutputTokens: 256 };
const asking = { ...common, prompt: "What will the weather be in Kyiv? Ask for it.", maxOutputTokens: 256 };

// Names the function in the first step; afterwards the model chooses.
const callFirst = ({ stepNumber }) =>
  stepNumber === 0 ? { toolChoice: { type: "tool", toolName: "weather" } } : { toolChoice: "none" };

const answers = {
  generateText: async () => {
    const { text, finishReason, usage } = await generateText(words);
    return { text, finishReason, usage };
  },
  streamText: async () => {
    const result = streamText(words);
    const parts = [];
    for await (const part of result.textStream) parts.push(part);
    return { parts, text: await result.text, finishReason: await result.finishReason, usage: await result.usage };
  },
  tools: async () => {
    const result = await generateText({
      ...asking,
      tools: { weather },
      prepareStep: callFirst,
      stopWhen: stepCountIs(2),
    });
    const steps = result.steps.map(({ toolCalls, toolResults, finishReason }) => ({
      finishReason,
      inputs: toolCalls.map(({ input }) => input),
      outputs: toolResults.map(({ output }) => output),
    }));
    return { steps, text: result.text };
  },
  streamTools: async () => {
    const chosen = { type: "tool", toolName: "weather" };
    const result = streamText({ ...asking, tools: { weather }, toolChoice: chosen });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    return { kinds, inputs: (await result.toolCalls).map(({ input }) => input) };
  },
  generateObject: async () => {
    const { object, finishReason } = await generateObject({ ...forms, schema: river });
    return { object, finishReason };
  },
  streamObject: async () => {
    const result = streamObject({ ...forms, schema: river });
    for await (const partial of result.partialObjectStream) void partial;
    return { object: await result.object };
  },
  output: async () => {
    const { output } = await generateText({ ...forms, output: Output.object({ schema: river }) });
    return { object: output };
  },
};

console.log(JSON.stringify(await answers[what]()));
