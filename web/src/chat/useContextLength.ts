import { shortName, useListedModels, useLoadedModels, useServerInfo } from "../api/manage";

/** The tokens that a model's context holds, "" being the server's default model; null while that is not known. */
export function useContextLength(model: string): number | null {
  const loaded = useLoadedModels().data;
  const listed = useListedModels().data;
  const usual = useServerInfo().data?.default_model ?? "";
  const name = shortName(model || usual);
  const isIt = (one: { name: string }) => shortName(one.name) === name;
  return loaded?.find(isIt)?.context_length ?? listed?.find(isIt)?.details.context_length ?? null;
}
