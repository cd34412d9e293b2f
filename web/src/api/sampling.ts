import { useQuery } from "@tanstack/react-query";
import { getJson } from "./client";

/** Values of sampling parameters by the request's fields. */
export type Sampling = Readonly<Record<string, number>>;

/** The fields that the page sends where the person leaves them open; the server's own defaults are those of an API. */
export const SENT = ["temperature", "top_k", "top_p", "min_p"] as const;

const FRESH_MS = 60_000;
const known = new Map<string, { at: number; values: Promise<Sampling> }>();

/** How answers of a model are sampled where the person says nothing; "" is the default model. */
export function readSampling(model: string): Promise<Sampling> {
  const found = known.get(model);
  if (found && Date.now() - found.at < FRESH_MS) return found.values;
  const values = askSampling(model);
  known.set(model, { at: Date.now(), values });
  values.catch(() => known.delete(model));
  return values;
}

async function askSampling(model: string): Promise<Sampling> {
  const name = model || (await getJson<{ default_model: string }>("/v1/admin/info")).default_model;
  return getJson<Sampling>(`/v1/admin/models/${encodeURIComponent(name)}/sampling`);
}

export function useSampling(model: string): Sampling {
  const query = useQuery({
    queryKey: ["models", "sampling", model],
    queryFn: () => readSampling(model),
    staleTime: FRESH_MS,
    retry: false,
  });
  return query.data ?? {};
}
