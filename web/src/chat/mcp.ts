import { useQuery } from "@tanstack/react-query";
import { getJson } from "../api/client";
import { savedStore } from "../lib/saved";
import { isObject, readTools, type ToolDefinition } from "./settings";
import type { Settings, ToolCall, ToolServer } from "./types";

/** The MCP servers that the owner of the server allows: names of programs, and addresses, `*` for every public one. */
export interface McpServers {
  commands: string[];
  urls: string[];
}

export interface McpTool {
  name: string;
  description: string;
  parameters: Record<string, unknown>;
}

const areTexts = (value: unknown): value is Record<string, string> =>
  isObject(value) && Object.values(value).every((one) => typeof one === "string");

/** Keys of MCP servers by their address. They stay in this browser, and in no conversation. */
export const mcpKeys = savedStore<Record<string, string>>("mcp.keys", {}, areTexts);

export function useMcpServers() {
  return useQuery({
    queryKey: ["mcp"],
    queryFn: ({ signal }) => getJson<McpServers>("/v1/admin/mcp", { signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
}

export async function listMcpTools(server: string): Promise<McpTool[]> {
  return (await getJson<{ tools: McpTool[] }>("/v1/admin/mcp/tools", { body: place(server) })).tools;
}

/** What the tool answers, as the model reads it. Raises an Error in words where it cannot be called. */
export async function callMcp(call: ToolCall, { server, tool }: ToolServer): Promise<string> {
  const given = readArguments(call.arguments);
  const body = { ...place(server), tool, arguments: given };
  const { text, is_error } = await getJson<{ text: string; is_error: boolean }>("/v1/admin/mcp/call", { body });
  return is_error ? `Error: ${text}` : text || "(no text)";
}

function place(server: string) {
  const key = mcpKeys.get()[server];
  return { server, ...(key && { key }) };
}

function readArguments(text: string): Record<string, unknown> {
  let given: unknown;
  try {
    given = JSON.parse(text || "{}");
  } catch {
    given = null;
  }
  if (!isObject(given)) throw new Error("The model's arguments are no JSON object.");
  return given;
}

/** Settings with the tools of a server added, each under a name that no other tool has; each call is asked about. */
export function addMcpTools(settings: Settings, server: string, tools: readonly McpTool[]): Partial<Settings> {
  const read = readTools(settings.tools);
  const all: ToolDefinition[] = typeof read === "string" ? [] : [...read];
  const toolServers = { ...settings.toolServers };
  for (const { name: tool, description, parameters } of tools) {
    const known = Object.entries(toolServers).find(([, one]) => one.server === server && one.tool === tool)?.[0];
    if (known !== undefined && all.some((one) => one.function.name === known)) continue;
    const name = nameTool(tool, server, new Set(all.map((one) => one.function.name)));
    all.push({ type: "function", function: { name, ...(description && { description }), parameters } });
    toolServers[name] = { server, tool, allowed: false };
  }
  return { tools: all.length > 0 ? JSON.stringify(all, null, 2) : "", toolServers };
}

/** A name of letters, digits, _ and - as models are given them. */
function nameTool(tool: string, server: string, taken: ReadonlySet<string>): string {
  const plain = (text: string) => text.replace(/[^A-Za-z0-9_-]+/g, "_").slice(0, 48);
  const choices = [plain(tool), `${plain(labelServer(server)).slice(0, 15)}_${plain(tool)}`];
  for (let number = 2; ; number++) {
    const free = choices.find((one) => one !== "" && !taken.has(one));
    if (free !== undefined) return free;
    choices.push(`${plain(tool)}_${number}`);
  }
}

/** A server's name for people: that of its program, or its host. */
export function labelServer(server: string): string {
  try {
    return server.includes("://") ? new URL(server).host : server;
  } catch {
    return server;
  }
}
