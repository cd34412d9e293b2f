import { keepPreviousData, type QueryClient, useQuery } from "@tanstack/react-query";
import { ApiError, getJson, send } from "./client";
import { readLines } from "./sse";

/** What kind of model it is, as `/api/tags` tells it. */
export interface Details {
  format: string;
  family: string;
  parameter_size: string;
  quantization_level: string;
  context_length: number;
  embedding_length: number;
}

/** A model on this machine. Sizes are bytes. */
export interface ListedModel {
  name: string;
  modified_at: string;
  size: number;
  digest: string;
  details: Details;
  capabilities: string[];
  /** Without one it is a base model, which continues text and does not chat. */
  has_chat_template: boolean;
}

/** A model in memory; `size` is what it takes now, its cache takes more as it is used, up to `cache_max_bytes`. */
export interface LoadedModel {
  name: string;
  size: number;
  weights_bytes: number;
  cache_in_use_bytes: number;
  cache_max_bytes: number;
  expires_at: string;
  context_length: number;
}

export interface Tensor {
  name: string;
  type: string;
  shape: number[];
}

/** All about one model. */
export interface ShownModel {
  license?: string;
  parameters: string;
  template: string;
  system?: string;
  details: Details;
  model_info: Record<string, unknown>;
  tensors: Tensor[];
  capabilities: string[];
  modified_at: string;
}

/** How far a pull is, in one line of its stream. */
export interface PullLine {
  status: string;
  digest?: string;
  total?: number;
  completed?: number;
  error?: string;
}

export function useListedModels() {
  return useQuery({
    queryKey: ["models", "listed"],
    queryFn: async ({ signal }) => (await getJson<{ models: ListedModel[] }>("/api/tags", { signal })).models,
  });
}

/** The models in memory, asked for again every few seconds as they are unloaded by themselves. */
export function useLoadedModels() {
  return useQuery({
    queryKey: ["models", "loaded"],
    queryFn: async ({ signal }) => (await getJson<{ models: LoadedModel[] }>("/api/ps", { signal })).models,
    refetchInterval: 4_000,
  });
}

export function useShownModel(name: string) {
  return useQuery({
    queryKey: ["models", "shown", name],
    queryFn: ({ signal }) => getJson<ShownModel>("/api/show", { body: { model: name }, signal }),
  });
}

export function refreshModels(queries: QueryClient): Promise<void> {
  return queries.invalidateQueries({ queryKey: ["models"] });
}

/** Where the files of a model lie, and whether they stay when it is deleted. */
export interface ModelFiles {
  path: string;
  size_bytes: number;
  stays: boolean;
  shared_with: string[];
}

export function useModelFiles(name: string) {
  return useQuery({
    queryKey: ["models", "files", name],
    queryFn: ({ signal }) => getJson<ModelFiles>(`/v1/admin/models/${encodeURIComponent(name)}/files`, { signal }),
    retry: false,
  });
}

/** Load a model; resolves when it answers. It stays for the server's usual time. */
export async function loadModel(model: string): Promise<void> {
  await send("/api/generate", { body: { model, stream: false } });
}

export async function unloadModel(model: string): Promise<void> {
  await send("/api/generate", { body: { model, keep_alive: 0, stream: false } });
}

export async function copyModel(source: string, destination: string, replace: boolean): Promise<void> {
  await send("/api/copy", { body: { source, destination, replace } });
}

/** Whether a request was refused because a model has that name already. */
export function isTaken(error: unknown): boolean {
  return error instanceof ApiError && error.status === 409;
}

export async function deleteModel(model: string): Promise<void> {
  await send("/api/delete", { method: "DELETE", body: { model } });
}

/** Pull a model from the hub, line by line. Ending the loop stops it; what came is kept for the next time. */
export async function* pullModel(model: string, signal: AbortSignal): AsyncGenerator<PullLine> {
  yield* readLines<PullLine>(await send("/api/pull", { body: { model }, signal }));
}

/** The name without ":latest", which says nothing. */
export function shortName(name: string): string {
  return name.replace(/:latest$/, "");
}

/** Give a file or folder on the server's machine a name. Answers with that name. */
export async function importModel(path: string, replace: boolean): Promise<string> {
  return (await getJson<{ name: string }>("/v1/admin/models/import", { body: { path, replace } })).name;
}

/** What the server is and may do, of what `GET /v1/admin/info` tells. */
export interface ServerInfo {
  version: string;
  device: string;
  dialects: string[];
  needs_key: boolean;
  default_model: string;
  context_tokens: number | null;
  max_sequences: number;
  max_waiting: number;
  max_body_bytes: number;
  keep_alive_s: number;
  models_memory_bytes: number;
  store_bytes: number;
  hub_url: string;
  import_folders: string[];
  tool_origins: string[];
}

export function useServerInfo() {
  return useQuery({
    queryKey: ["info"],
    queryFn: ({ signal }) => getJson<ServerInfo>("/v1/admin/info", { signal }),
    staleTime: 60_000,
  });
}

/** A well-known model that can be pulled by its name; `fits` compares its files with the memory that is free. */
export interface KnownModel {
  name: string;
  about: string;
  repository: string;
  size_bytes: number;
  fits: "yes" | "slow" | "tight" | "no" | "unknown";
  /** About; null where the memory of the server's machine was never measured. */
  tokens_per_s: number | null;
}

/** A repository of the hub with GGUF files, by the name that a pull takes. */
export interface FoundModel {
  name: string;
  downloads: number;
}

export function useKnownModels(enabled: boolean) {
  return useQuery({
    queryKey: ["library"],
    queryFn: async ({ signal }) => (await getJson<{ models: KnownModel[] }>("/v1/admin/library", { signal })).models,
    staleTime: 60_000,
    enabled,
  });
}

/** What the hub has for these words besides; the server asks it. */
export function useHubSearch(words: string) {
  return useQuery({
    queryKey: ["library", words],
    queryFn: async ({ signal }) =>
      (await getJson<{ hub: FoundModel[] }>(`/v1/admin/library?search=${encodeURIComponent(words)}`, { signal })).hub,
    staleTime: 60_000,
    retry: false,
  });
}

/** The memory that a model takes, or would take if it were loaded now, in bytes. */
export interface MemoryEstimate {
  is_loaded: boolean;
  weights_bytes: number;
  /** Kept for the cache, whatever other models want. */
  cache_bytes: number;
  cache_in_use_bytes: number;
  cache_max_bytes: number;
  free_bytes: number;
  fits: boolean;
  /** Models that would be unloaded to make room. */
  unloads: string[];
  /** A conversation of this many tokens fills that much of the cache. */
  conversation_tokens: number;
  conversation_bytes: number;
  /** Why it does not fit, and what to do about it. */
  reason: string | null;
}

/** The estimate for a conversation of `tokens` tokens; of the whole context where that is null. */
export function useMemoryEstimate(name: string, tokens: number | null = null) {
  const query = tokens === null ? "" : `?tokens=${tokens}`;
  return useQuery({
    queryKey: ["models", "memory", name, tokens],
    queryFn: ({ signal }) =>
      getJson<MemoryEstimate>(`/v1/admin/models/${encodeURIComponent(name)}/memory${query}`, { signal }),
    placeholderData: keepPreviousData,
    retry: false,
  });
}
