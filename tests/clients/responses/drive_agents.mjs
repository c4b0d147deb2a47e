// The @openai/agents package.
import { Agent, OpenAIResponsesModel, run, setTracingDisabled, tool as asTool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';
import { ASK, MOCK, MODEL, REAL, tell, weather } from './telling.mjs';

setTracingDisabled(true);
const model = (baseURL, name = MODEL) =>
  new OpenAIResponsesModel(new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0, timeout: 100_000 }), name);
const City = z.object({ name: z.enum(['Paris', 'Rome', 'Oslo']), rivers: z.number().int().min(0).max(9) });
const agent = (baseURL, more = {}, name = MODEL) => new Agent({ name: 'one', model: model(baseURL, name), ...more });

function withTool() {
  const called = [];
  const get_weather = asTool({
    name: 'get_weather',
    description: 'what the weather is',
    parameters: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push({ city });
      return weather(city);
    },
  });
  return [agent(MOCK, { tools: [get_weather] }), called];
}

async function streamed(of, text) {
  const result = await run(of, text, { stream: true });
  const pieces = [];
  for await (const event of result) {
    if (event.type === 'raw_model_stream_event' && event.data.type === 'output_text_delta') pieces.push(event.data.delta);
  }
  await result.completed;
  return [pieces, result.finalOutput];
}

await tell({
  plain: async () => (await run(agent(REAL, { instructions: 'Answer.' }), ASK.capital)).finalOutput,
  stream: async () => (await streamed(agent(REAL), ASK.capital))[0],
  think: async () => {
    const result = await run(agent(MOCK), ASK.think);
    const thought = result.newItems.find((item) => item.type === 'reasoning_item');
    return { thought: thought.rawItem.content[0].text, text: result.finalOutput };
  },
  tool: async () => {
    const [one, called] = withTool();
    return { text: (await run(one, ASK.weather)).finalOutput, called };
  },
  tool_stream: async () => {
    const [one, called] = withTool();
    return { text: (await streamed(one, ASK.weather))[1], called };
  },
  form: async () => (await run(agent(REAL, { outputType: City }), ASK.form)).finalOutput,
  refused: async () => (await run(agent(MOCK, {}, 'nobody'), 'hi')).finalOutput,
  overflow: async () => (await run(agent(MOCK), ASK.long)).finalOutput,
  failed: async () => (await run(agent(MOCK), ASK.fail)).finalOutput,
  broken: () => streamed(agent(MOCK), ASK.fail),
});
