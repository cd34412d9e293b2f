import { isObject, type ToolDefinition } from "./settings";

/** Types that a parameter can have in the form. */
export const TYPES = { string: "Text", number: "Number", integer: "Whole number", boolean: "Yes or no" } as const;
export type ParameterType = keyof typeof TYPES;

export interface Parameter {
  name: string;
  type: ParameterType;
  description: string;
  required: boolean;
}

/** A tool as fields of a form. */
export interface ToolForm {
  name: string;
  description: string;
  parameters: readonly Parameter[];
}

/** A tool as a form; null where its parameters are more than the form can say. */
export function readForm({ function: given }: ToolDefinition): ToolForm | null {
  const schema = given.parameters ?? { type: "object", properties: {} };
  if (!isObject(schema)) return null;
  const { type, properties = {}, required = [], ...rest } = schema;
  if (type !== "object" || !isObject(properties) || !Array.isArray(required) || Object.keys(rest).length > 0)
    return null;
  const parameters: Parameter[] = [];
  for (const [name, property] of Object.entries(properties)) {
    if (!isObject(property) || typeof property.type !== "string" || !Object.hasOwn(TYPES, property.type)) return null;
    const { type: kind, description = "", ...more } = property;
    if (Object.keys(more).length > 0 || typeof description !== "string") return null;
    parameters.push({ name, type: kind as ParameterType, description, required: required.includes(name) });
  }
  return { name: given.name, description: given.description ?? "", parameters };
}

export function writeForm({ name, description, parameters }: ToolForm): ToolDefinition {
  const named = parameters.filter((one) => one.name.trim() !== "");
  const properties = Object.fromEntries(
    named.map((one) => [one.name.trim(), { type: one.type, ...(one.description && { description: one.description }) }]),
  );
  const required = named.filter((one) => one.required).map((one) => one.name.trim());
  return {
    type: "function",
    function: {
      name: name.trim(),
      ...(description.trim() && { description: description.trim() }),
      parameters: { type: "object", properties, ...(required.length > 0 && { required }) },
    },
  };
}

/** What is wrong with the name of a tool, among those that there are; null for nothing. */
export function checkName(name: string, others: readonly string[]): string | null {
  if (!/^[\w-]{1,64}$/.test(name.trim())) return "A name has letters, digits, _ and -, and no space.";
  return others.includes(name.trim()) ? "There is a tool of this name." : null;
}
