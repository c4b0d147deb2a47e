/**
 * Has the client of omp make calls to a worker, and tells what came of each as a line of JSON.
 *
 *     CLIENT=<folder with node_modules> bun drive.ts HOW CALLS
 *
 * HOW is the way in which the client comes to a worker when none answers:
 *   found     the client as it is: somebody listens already
 *   entry     omp's main script, run by bun; that is this file, which becomes EMBERD, and writes its start and its end into ENDS
 *   compiled  omp as one executable; that is EMBERD
 *   launch    a launch of our own, given to the client's constructor; it starts EMBERD with the options of `emberd worker`
 *   mlx       the Python environment for MLX, as on a Mac with Apple silicon
 *
 * CALLS is a JSON list of Call. With WAIT in the environment, the first one is made when standard input has a line: several clients can start at once.
 */
import { appendFileSync, openSync } from "node:fs";

type Call = {
	call: "prewarm" | "load" | "title" | "complete" | "session" | "smoke";
	/** The model, and what is said to it. */
	key?: string;
	text?: string;
	system?: string;
	tokens?: number;
	/** So many of this call at once; the result is then a list. */
	times?: number;
	/** Abort the call with the first progress event of this status. */
	abort?: string;
};

const { CLIENT, EMBERD, ENDS, WAIT } = process.env as Record<string, string>;
const AGENT = `${CLIENT}/node_modules/@oh-my-pi/pi-coding-agent`;
const SELECTOR = "__omp_worker_tiny_inference";

if (process.argv.includes(SELECTOR)) {
	appendFileSync(ENDS, `start ${process.pid}\n`);
	const worker = Bun.spawn({ cmd: [EMBERD, SELECTOR], stdio: ["ignore", "inherit", "inherit"] });
	const code = await worker.exited;
	appendFileSync(ENDS, `end ${process.pid} ${code}\n`);
	process.exit(code);
}

const module = await import(`${AGENT}/src/tiny/title-client.ts`);
const [how, calls] = [process.argv[2], JSON.parse(process.argv[3]) as Call[]];
const tell = (line: object) => console.log(JSON.stringify(line, (_, value) => (value === undefined ? null : value)));
const client = await reach(how);

async function reach(how: string) {
	if (how === "entry") {
		(await import(`${CLIENT}/node_modules/@oh-my-pi/pi-utils/src/worker-host.ts`)).declareWorkerHostEntry();
	} else if (how === "compiled") {
		process.env.PI_COMPILED = "1";
		process.execPath = EMBERD;
	} else if (how === "launch") {
		const spawn = async (socket: string, logPath: string) => {
			const log = openSync(logPath, "w");
			const options = ["worker", "--socket", socket, "--model-key", "lfm2.5-230m", "--tag", "of-our-own"];
			const proc = Bun.spawn({ cmd: [EMBERD, ...options], stdio: ["ignore", log, log], detached: true });
			proc.unref();
			return { proc, logPath };
		};
		const launch = { backend: "onnx", tag: "of-our-own", spawn };
		return new module.TinyTitleClient((key: string) => module.connectTinyWorker(launch, key));
	} else if (how === "mlx") {
		Object.defineProperty(process, "platform", { value: "darwin" });
		Object.defineProperty(process, "arch", { value: "arm64" });
		process.env.PI_TINY_DEVICE = "mlx";
		tell({ mlx: module.tinyWorkerUsesMlx() });
	}
	return module.tinyTitleClient;
}

const events: { status: string }[] = [];
const aborts = new Map<string, AbortController>();
client.onProgress((event: { status: string }) => {
	events.push(event);
	aborts.get(event.status)?.abort();
});

async function make(call: Call): Promise<unknown> {
	const { key = "lfm2.5-230m", text = "", system } = call;
	const controller = new AbortController();
	if (call.abort) aborts.set(call.abort, controller);
	const options = { signal: controller.signal, systemPrompt: system, maxTokens: call.tokens };
	switch (call.call) {
		case "prewarm":
			return client.prewarm(key) ?? null;
		case "load":
			return client.downloadModel(key, options);
		case "title":
			return client.generate(key, text, options);
		case "complete":
			return client.complete(key, text, options);
		case "session": {
			const { generateSessionTitle } = await import(`${AGENT}/src/utils/title-generator.ts`);
			const { Settings } = await import(`${AGENT}/src/config/settings.ts`);
			const settings = Settings.isolated({ "providers.tinyModel": key });
			return generateSessionTitle(text, { getAvailable: () => [] }, settings, "a session");
		}
		case "smoke":
			return (await module.smokeTestTinyTitleWorker()) ?? "pong";
	}
}

if (WAIT) {
	tell({ ready: true });
	for await (const _ of console) break;
}
for (const call of calls) {
	const { times = 1 } = call;
	const results = await Promise.all(Array.from({ length: times }, () => make(call)));
	tell({ [call.call]: times === 1 ? results[0] : results });
}
tell({ events });
await client.terminate();
// A client that is done goes by itself; what a session's settings leave behind does not.
if (WAIT || calls.some(call => call.call === "session")) process.exit(0);
