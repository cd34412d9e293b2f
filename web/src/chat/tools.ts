import { describeError } from "../api/client";
import { answerBuiltIn, readScript } from "./builtInTools";
import { callMcp } from "./mcp";
import { runScript } from "./script";
import type { Settings, ToolCall } from "./types";

const MOST_CHARACTERS = 200_000;
const TIMEOUT_MS = 60_000;

/** Send a call's arguments to the address that the person allowed; the result is what it answers, as text. */
export async function askUrl(call: ToolCall, url: string): Promise<string> {
  const address = readUrl(url);
  if (typeof address === "string") throw new Error(address);
  const refusal = hearRefusal(address.origin);
  try {
    const response = await fetch(address, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: call.arguments || "{}",
      credentials: "omit",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${address.href} answered with status ${response.status}: ${text.slice(0, 300)}`);
    return text.length <= MOST_CHARACTERS ? text : `${text.slice(0, MOST_CHARACTERS)}\n… (cut)`;
  } catch (error) {
    if (error instanceof DOMException && error.name === "TimeoutError")
      throw new Error(`${address.href} did not answer within ${TIMEOUT_MS / 1000} s.`);
    if (!(error instanceof TypeError)) throw error;
    throw new Error((await refusal.heard()) ? forbidden(address) : unreachable(address));
  } finally {
    refusal.end();
  }
}

/**
 * The results of all calls, in their order; null where one of them got none, or may not be made without a question:
 * built-in tools answer here, programs, addresses and MCP servers where the person allowed that.
 */
export async function answerCalls(calls: readonly ToolCall[], settings: Settings): Promise<string[] | null> {
  const known = calls.map((call) => answerBuiltIn(call, settings.tools));
  const scripts = calls.map((call) => readScript(call, settings.tools));
  const isAllowed = ({ name }: ToolCall, at: number) => {
    if (scripts[at] !== null) return settings.runsScripts;
    return settings.toolServers?.[name] ? settings.toolServers[name].allowed : settings.toolUrls[name]?.automatic;
  };
  if (!calls.every((call, at) => known[at] !== null || isAllowed(call, at))) return null;
  const results = await Promise.all(
    calls.map((call, at) => {
      const server = settings.toolServers?.[call.name];
      const script = scripts[at];
      const asked = () => {
        if (typeof script === "string") return runScript(script);
        return server ? callMcp(call, server) : askUrl(call, settings.toolUrls[call.name]?.url ?? "");
      };
      return known[at] ?? asked().catch((error) => new Error(describeError(error)));
    }),
  );
  return results.every((result) => typeof result === "string") ? results : null;
}

/** The address that a text names, or a sentence why it is none. */
export function readUrl(text: string): URL | string {
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    return "An address looks like http://127.0.0.1:9000/tool.";
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return "The address begins with http:// or https://.";
  if (url.username || url.password) return "Leave the name and password out of the address.";
  return url;
}

function unreachable(url: URL): string {
  return (
    `${url.origin} gave no answer that this page may read. ` +
    "Check that it runs, and that it allows this page (CORS: access-control-allow-origin, access-control-allow-headers: content-type)."
  );
}

function forbidden(url: URL): string {
  return `This page may not reach ${url.origin}. Start the server with “--page-tool-origins ${url.origin}” to allow it.`;
}

/** Listens for the browser's word that the page's own policy forbade a request. */
function hearRefusal(origin: string) {
  let refused = false;
  const listen = (event: SecurityPolicyViolationEvent) => {
    if (event.blockedURI.startsWith(origin)) refused = true;
  };
  document.addEventListener("securitypolicyviolation", listen);
  const heard = async () => {
    // The browser tells of a refusal a moment after the request has failed.
    await new Promise((resolve) => setTimeout(resolve, 50));
    return refused;
  };
  return { heard, end: () => document.removeEventListener("securitypolicyviolation", listen) };
}
