// The openai package for Node.
import OpenAI from 'openai';
import { zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { ASK, MOCK, MODEL, REAL, tell, weather } from './telling.mjs';

const client = (baseURL) => new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0, timeout: 100_000 });
const [mock, real] = [client(MOCK), client(REAL)];
const City = z.object({ name: z.enum(['Paris', 'Rome', 'Oslo']), rivers: z.number().int().min(0).max(9) });
const tools = [
  {
    type: 'function',
    name: 'get_weather',
    description: 'what the weather is',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false },
    strict: true,
  },
];

async function tool(streamed) {
  const input = [{ role: 'user', content: ASK.weather }];
  const called = [];
  for (;;) {
    const body = { model: MODEL, input, tools };
    const response = streamed ? await mock.responses.stream(body).finalResponse() : await mock.responses.create(body);
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (calls.length === 0) return { called, text: response.output_text };
    input.push(...response.output);
    for (const call of calls) {
      called.push(JSON.parse(call.arguments));
      input.push({ type: 'function_call_output', call_id: call.call_id, output: weather(called.at(-1).city) });
    }
  }
}

await tell({
  plain: async () => (await real.responses.create({ model: MODEL, input: ASK.capital })).output_text,
  stream: async () => {
    const pieces = [];
    for await (const event of await real.responses.create({ model: MODEL, input: ASK.capital, stream: true })) {
      if (event.type === 'response.output_text.delta') pieces.push(event.delta);
    }
    return pieces;
  },
  think: async () => {
    const response = await mock.responses.create({ model: MODEL, input: ASK.think });
    return { thought: response.output.find((item) => item.type === 'reasoning').summary[0].text, text: response.output_text };
  },
  tool: () => tool(false),
  tool_stream: () => tool(true),
  form: async () =>
    (await real.responses.parse({ model: MODEL, input: ASK.form, text: { format: zodTextFormat(City, 'city') } })).output_parsed,
  refused: () => mock.responses.create({ model: 'nobody', input: 'hi' }),
  overflow: () => mock.responses.create({ model: MODEL, input: ASK.long, stream: true }),
  failed: async () => {
    let last;
    for await (const event of await mock.responses.create({ model: MODEL, input: ASK.fail, stream: true })) last = event;
    return { code: last.response.error.code, says: last.response.error.message, text: last.response.output[0].content[0].text };
  },
});
