// What every driver of a Node client shares: what it is given, the questions, and how it tells what came of them.

export const { mock: MOCK, real: REAL, model: MODEL, ask: ASK } = JSON.parse(process.argv[2]);

export const weather = (city) => `21 degrees in ${city}`;

/** Runs the scenarios and tells what came of each, on a line of its own. A failure is told as well, for the test to judge. */
export async function tell(scenarios) {
  for (const [name, scenario] of Object.entries(scenarios)) {
    let told;
    try {
      told = { told: await scenario() };
    } catch (error) {
      console.error(error);
      told = { error: error?.constructor?.name ?? typeof error, says: `${error?.message ?? JSON.stringify(error)} ${error?.code ?? ''}` };
    }
    console.log(JSON.stringify({ name, ...told }));
  }
}
