// The AI SDK with its provider for the Responses API.
import { createOpenAI } from '@ai-sdk/openai';
import { Output, generateText, stepCountIs, streamText, tool as asTool } from 'ai';
import { z } from 'zod';
import { ASK, MOCK, MODEL, REAL, tell, weather } from './telling.mjs';

const model = (baseURL, name = MODEL) => createOpenAI({ baseURL, apiKey: 'none' }).responses(name);
const City = z.object({ name: z.enum(['Paris', 'Rome', 'Oslo']), rivers: z.number().int().min(0).max(9) });
const ask = (baseURL, prompt, more = {}, name = MODEL) =>
  generateText({ model: model(baseURL, name), prompt, maxRetries: 0, ...more });

function withTool() {
  const called = [];
  const get_weather = asTool({
    description: 'what the weather is',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push({ city });
      return weather(city);
    },
  });
  // Else it sends the names of stored items in the place of the items.
  const providerOptions = { openai: { store: false } };
  return [{ tools: { get_weather }, stopWhen: stepCountIs(4), providerOptions }, called];
}

/** Everything a stream tells: its text, its thoughts, what went wrong, how it ended. */
async function streamed(baseURL, prompt, more = {}) {
  const told = { pieces: [], thought: '', errors: [], finish: undefined };
  const result = streamText({ model: model(baseURL), prompt, maxRetries: 0, onError() {}, ...more });
  for await (const part of result.fullStream) {
    if (part.type === 'text-delta') told.pieces.push(part.text);
    if (part.type === 'reasoning-delta') told.thought += part.text;
    if (part.type === 'error') told.errors.push(part.error?.message ?? JSON.stringify(part.error));
    if (part.type === 'finish') told.finish = part.finishReason;
  }
  return told;
}

await tell({
  plain: async () => (await ask(REAL, ASK.capital)).text,
  stream: async () => (await streamed(REAL, ASK.capital)).pieces,
  think: async () => {
    const result = await ask(MOCK, ASK.think);
    return { thought: result.reasoningText, text: result.text };
  },
  think_stream: async () => {
    const { thought, pieces } = await streamed(MOCK, ASK.think);
    return { thought, text: pieces.join('') };
  },
  tool: async () => {
    const [more, called] = withTool();
    return { text: (await ask(MOCK, ASK.weather, more)).text, called };
  },
  tool_stream: async () => {
    const [more, called] = withTool();
    const { pieces, errors } = await streamed(MOCK, ASK.weather, more);
    return { text: pieces.join(''), errors, called };
  },
  form: async () => (await ask(REAL, ASK.form, { output: Output.object({ schema: City }) })).output,
  refused: () => ask(MOCK, 'hi', {}, 'nobody'),
  overflow: () => ask(MOCK, ASK.long),
  failed: () => streamed(MOCK, ASK.fail),
  cut: () => streamed(MOCK, ASK.endless, { maxOutputTokens: 16 }),
});
