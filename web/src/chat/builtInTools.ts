import { calculate } from "./calculate";
import { readTools, type ToolDefinition } from "./settings";
import type { ToolCall } from "./types";

/** A tool that the page answers by itself: it reads nothing of this computer and changes nothing. */
interface BuiltIn {
  label: string;
  definition: ToolDefinition;
  /** Null for the tool whose calls the person is asked about. */
  answer: ((given: Record<string, unknown>) => string) | null;
}

export const SCRIPT: BuiltIn = {
  label: "JavaScript in a sandbox (asks before it runs)",
  definition: {
    type: "function",
    function: {
      name: "run_javascript",
      description:
        "Runs a program in JavaScript, without network, files or a page, for 4 seconds at most. " +
        "The result is what it prints with console.log and what it returns.",
      parameters: {
        type: "object",
        properties: { code: { type: "string", description: "An expression, or statements that print or return" } },
        required: ["code"],
      },
    },
  },
  answer: null,
};

export const BUILT_IN_TOOLS: readonly BuiltIn[] = [
  {
    label: "Current time (answered here)",
    definition: {
      type: "function",
      function: {
        name: "get_time",
        description: "The date and time now, and the time zone.",
        parameters: { type: "object", properties: {} },
      },
    },
    answer: () => JSON.stringify(describeNow(new Date())),
  },
  {
    label: "Calculator (answered here)",
    definition: {
      type: "function",
      function: {
        name: "calculate",
        description: "The value of an arithmetic expression, with + - * / % ^, sqrt, sin, log, pi and the like.",
        parameters: {
          type: "object",
          properties: { expression: { type: "string", description: "Such as 2 * (3 + sqrt(16))^2" } },
          required: ["expression"],
        },
      },
    },
    answer: ({ expression }) => String(calculate(String(expression ?? ""))),
  },
  SCRIPT,
];

/** The program of a call, if it is one of the built-in tool that runs programs; null otherwise. */
export function readScript(call: ToolCall, tools: string): string | null {
  if (call.name !== SCRIPT.definition.function.name || !hasBuiltIn(tools, SCRIPT.definition)) return null;
  try {
    const { code } = JSON.parse(call.arguments) as { code?: unknown };
    return typeof code === "string" ? code : null;
  } catch {
    return null;
  }
}

/** The result of a call, if the conversation has that built-in tool as it was made; null for calls of others. */
export function answerBuiltIn(call: ToolCall, tools: string): string | null {
  const built = BUILT_IN_TOOLS.find(({ definition }) => definition.function.name === call.name);
  if (!built?.answer || !hasBuiltIn(tools, built.definition)) return null;
  try {
    return built.answer(JSON.parse(call.arguments || "{}") as Record<string, unknown>);
  } catch (error) {
    return `Error: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** Whether the list of tools has this one, unchanged. */
export function hasBuiltIn(tools: string, definition: ToolDefinition): boolean {
  const read = readTools(tools);
  return typeof read !== "string" && read.some((tool) => JSON.stringify(tool) === JSON.stringify(definition));
}

function describeNow(now: Date) {
  return {
    local: now.toLocaleString("en-GB", { dateStyle: "full", timeStyle: "long" }),
    utc: now.toISOString(),
    time_zone: Intl.DateTimeFormat().resolvedOptions().timeZone,
  };
}
