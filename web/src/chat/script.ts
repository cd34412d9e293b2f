import { openSandbox } from "../lib/sandbox";

const LIMIT_MS = 4_000;
const MOST_CHARACTERS = 20_000;

/** What a program in JavaScript prints and returns, run in a sandbox for a few seconds at most. */
export async function runScript(code: string): Promise<string> {
  const sandbox = await openSandbox([`(${answerInSandbox})()`]);
  try {
    const question = {
      code,
      prelude: `(${prepareWorker})(${MOST_CHARACTERS})`,
      limitMs: LIMIT_MS,
      most: MOST_CHARACTERS,
    };
    return String(await sandbox.ask(question, 3 * LIMIT_MS));
  } finally {
    sandbox.end();
  }
}

declare const port: MessagePort;

/**
 * Runs in the sandbox, and so uses nothing of this file. The program runs in a worker, which can be stopped in the midst
 * of a loop: first as an expression, whose value is told, or else as the body of a function.
 */
function answerInSandbox(): void {
  port.onmessage = ({ data: { code, prelude, limitMs, most } }) => {
    const lines: string[] = [];
    let length = 0;
    let timer: ReturnType<typeof setTimeout>;
    let worker: Worker;
    const end = (last: string) => {
      clearTimeout(timer);
      worker.terminate();
      const text = [...lines, last].filter(Boolean).join("\n");
      const cut = text.length > most ? `${text.slice(0, most)}\n… (cut)` : text;
      port.postMessage(cut || "(It printed nothing and returned nothing.)");
    };
    const start = (body: string, isExpression: boolean) => {
      let begun = false;
      const keep = (text: string) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
      const program = keep(`(async()=>{tell("begun");return(async()=>{${body}\n})()})().then(tellValue,tellError)`);
      // Only from a script that another one loads does every browser tell why it cannot be read.
      worker = new Worker(
        keep(`${prelude};try{importScripts("${program}")}catch(error){tell({refused:String(error)})}`),
      );
      const refuse = (reason: string) => {
        worker.terminate();
        if (!begun && isExpression) start(code, false);
        else end(`Error: ${reason}`);
      };
      worker.onerror = (event) => {
        event.preventDefault();
        refuse(event.message ?? "It could not be started.");
      };
      worker.onmessage = ({ data }) => {
        if (data === "begun") begun = true;
        if (typeof data !== "object" || data === null) return;
        if ("text" in data) {
          lines.push(String(data.text));
          length += lines.at(-1)?.length ?? 0;
          if (length > most) end("");
        } else if ("refused" in data) refuse(String(data.refused));
        else end("error" in data ? `Error: ${data.error}` : String(data.value));
      };
    };
    timer = setTimeout(() => end(`Error: It was stopped after ${limitMs / 1000} s.`), limitMs);
    start(`return (${code}\n)`, true);
  };
}

/** Runs in the worker before the program: keeps what it prints within bounds, and tells it. */
function prepareWorker(most: number): void {
  let length = 0;
  const scope = self as unknown as Record<string, unknown>;
  const post = self.postMessage.bind(self) as (what: unknown) => void;
  const write = (value: unknown): string => {
    if (typeof value === "string") return value;
    if (value instanceof Error) return String(value);
    if (value instanceof Map || value instanceof Set) return write([...value]);
    if (typeof value !== "object" || value === null) return String(value);
    try {
      return JSON.stringify(value, (_, inner) => (typeof inner === "bigint" ? `${inner}n` : inner)) ?? String(value);
    } catch {
      return String(value);
    }
  };
  const print = (...values: unknown[]) => {
    if (length > most) return;
    const text = values
      .map(write)
      .join(" ")
      .slice(0, most + 1);
    length += text.length + 1;
    post({ text });
  };
  scope.tell = post;
  scope.tellValue = (value: unknown) => post({ value: value === undefined ? "" : write(value).slice(0, most + 1) });
  scope.tellError = (error: unknown) => post({ error: write(error).slice(0, most + 1) });
  for (const name of ["log", "info", "warn", "error", "debug", "table"] as const) console[name] = print;
}
