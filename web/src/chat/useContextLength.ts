import { shortName, useListedModels, useLoadedModels } from "../api/manage";
import { useModels } from "../api/models";

/** The tokens that a model's context holds, "" being the server's default model; null while that is not known. */
export function useContextLength(model: string): number | null {
  const loaded = useLoadedModels().data;
  const listed = useListedModels().data;
  const first = useModels().data?.[0]?.id ?? "";
  const name = shortName(model || first);
  const isIt = (one: { name: string }) => shortName(one.name) === name;
  return loaded?.find(isIt)?.context_length ?? listed?.find(isIt)?.details.context_length ?? null;
}
