import {
  type ListedModel,
  type LoadedModel,
  shortName,
  useListedModels,
  useLoadedModels,
  useServerInfo,
} from "../api/manage";

/** The tokens that a model's context holds, "" being the server's default model; null while that is not known. */
export function useContextLength(model: string): number | null {
  const loaded = useLoadedModels().data;
  const listed = useListedModels().data;
  const usual = useServerInfo().data?.default_model ?? "";
  return findContext(model || usual, loaded, listed);
}

/** As much as a model holds while it is loaded, or else as its files say; null while that is not known. */
export function findContext(
  model: string,
  loaded: readonly LoadedModel[] | undefined,
  listed: readonly ListedModel[] | undefined,
): number | null {
  const name = shortName(model);
  const isIt = (one: { name: string }) => shortName(one.name) === name;
  return loaded?.find(isIt)?.context_length ?? listed?.find(isIt)?.details.context_length ?? null;
}
