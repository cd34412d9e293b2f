import { apiKey, wantKey } from "./key";

/** A request that failed, in words for the person. `status` is 0 when no server answered. */
export class ApiError extends Error {
  readonly status: number;
  /** The field that is wrong, if the server named one. */
  readonly field: string | null;

  constructor(status: number, message: string, field: string | null = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.field = field;
  }
}

export interface Send {
  method?: "GET" | "POST" | "PUT" | "DELETE";
  /** Sent as JSON. */
  body?: unknown;
  /** Sent as it is. */
  file?: Blob;
  signal?: AbortSignal;
  /** The page reads this to show it, again and again perhaps; nobody asked for it. */
  reads?: boolean;
}

/** Send a request to the server that served the page; an `ApiError` tells why there is no good answer. */
export async function send(path: string, options: Send = {}): Promise<Response> {
  const headers: Record<string, string> = {};
  if (options.body !== undefined) headers["content-type"] = "application/json";
  const key = apiKey.get();
  if (key) headers.authorization = `Bearer ${key}`;
  const isBare = options.body === undefined && options.file === undefined;
  const init: RequestInit = { method: options.method ?? (isBare ? "GET" : "POST"), headers };
  if (options.body !== undefined) init.body = JSON.stringify(options.body);
  if (options.file !== undefined) init.body = options.file;
  if (options.signal) init.signal = options.signal;
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError(0, "The server does not answer. Is it still running? Start it again with “mlxr serve”.");
  }
  if (response.ok) return response;
  if (response.status === 401) wantKey(key, options.reads ?? false);
  throw await readError(response);
}

/** The JSON of a good answer. The caller says its type; the server's own tests hold it. */
export async function getJson<T>(path: string, options: Send = {}): Promise<T> {
  const response = await send(path, { ...options, reads: true });
  return (await response.json()) as T;
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** What went wrong, as one sentence for the person. */
export function describeError(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** The error of a refused request: OpenAI's `{error: {message, param}}`, our `field` for `param`, or Ollama's text. */
async function readError(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text) as { error?: unknown };
    if (typeof error === "string") return new ApiError(response.status, error);
    if (error && typeof error === "object") {
      const { message, param, field = param } = error as { message?: unknown; param?: unknown; field?: unknown };
      if (typeof message === "string")
        return new ApiError(response.status, message, typeof field === "string" ? field : null);
    }
  } catch {
    // Not JSON: the status has to do.
  }
  return new ApiError(response.status, `The server answered with status ${response.status}.`);
}
