import { useQuery } from "@tanstack/react-query";
import { getJson } from "./client";

/** A model of `GET /v1/models`. */
export interface Model {
  id: string;
  created: number;
  owned_by: string;
  /** The model that an adapter is for. */
  parent: string | null;
  /** Of adapters null: what their model can do. */
  capabilities: string[] | null;
}

/** Whether a model is one of those that come with mlxr, which know little. */
export function isDemo(id: string): boolean {
  return id === "demo" || id === "demo-draft";
}

/** What a person reads for a model: the demo says what it is good for. */
export function nameModel(id: string): string {
  return id === "demo" ? "Demo: Python library only" : id;
}

/** Whether a model writes text, as all but encoders do; adapters do what their model does. */
export function writes({ capabilities }: Model): boolean {
  return capabilities?.includes("completion") ?? true;
}

/** Whether a model sees pictures; null while that is not known. */
export function findSight(models: readonly Model[] | undefined, name: string): boolean | null {
  const named = (wanted: string) => models?.find(({ id }) => id === wanted || id === wanted.replace(/:latest$/, ""));
  const model = named(name);
  const capabilities = model?.capabilities ?? named(model?.parent ?? "")?.capabilities;
  return capabilities?.includes("vision") ?? null;
}

/** The models on this machine, by name. */
export function useModels() {
  return useQuery({
    queryKey: ["models"],
    queryFn: async ({ signal }) => (await getJson<{ data: Model[] }>("/v1/models", { signal })).data,
  });
}
