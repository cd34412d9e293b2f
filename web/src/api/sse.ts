/** One server-sent event: its name ("message" when it has none) and its data. */
export interface ServerEvent {
  event: string;
  data: string;
}

/** Cuts a stream of server-sent events, given in pieces of any size, into events. */
export class SseParser {
  private rest = "";
  private event = "";
  private data: string[] = [];

  push(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "") {
        if (this.data.length > 0) events.push({ event: this.event || "message", data: this.data.join("\n") });
        this.event = "";
        this.data = [];
        continue;
      }
      const colon = line.indexOf(":");
      if (colon === 0) continue;
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "data") this.data.push(value);
      else if (name === "event") this.event = value;
    }
    return events;
  }
}

/** The events of a response's body, as they come. Leaving the loop ends the request. */
export async function* readEvents(response: Response): AsyncGenerator<ServerEvent> {
  for await (const text of readText(response)) yield* text;

  async function* readText(from: Response): AsyncGenerator<ServerEvent[]> {
    const parser = new SseParser();
    for await (const piece of readPieces(from)) yield parser.push(piece);
  }
}

/** The JSON values of a body of one value a line (Ollama's streams), as they come. */
export async function* readLines<T>(response: Response): AsyncGenerator<T> {
  let rest = "";
  for await (const piece of readPieces(response)) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) if (line.trim()) yield JSON.parse(line) as T;
  }
  if (rest.trim()) yield JSON.parse(rest) as T;
}

async function* readPieces(response: Response): AsyncGenerator<string> {
  if (response.body === null) return;
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
