import { getJson } from "../api/client";
import type { ListedModel, LoadedModel, ShownModel } from "../api/manage";
import { shortName } from "../api/manage";
import type { Embedder } from "./storage";

/** The numbers of the ways in which a model's files say that its vectors are made: mean, cls, last. */
const POOLINGS = [1, 2, 3];

/** By digest: whether a model's files say how it makes vectors, which those of models that only chat do not. */
const known = new Map<string, boolean>();

/** The models of the server that are made for vectors: those in memory first, then the smaller ones. */
export async function listEmbedders(signal: AbortSignal): Promise<Embedder[]> {
  const { models } = await getJson<{ models: ListedModel[] }>("/api/tags", { signal });
  const loaded = (await getJson<{ models: LoadedModel[] }>("/api/ps", { signal })).models.map(({ name }) => name);
  const made: ListedModel[] = [];
  for (const model of models) if (await isEmbedder(model, signal)) made.push(model);
  const order = ({ name }: ListedModel) => (loaded.includes(name) ? 0 : 1);
  return made
    .sort((a, b) => order(a) - order(b) || a.size - b.size || (a.name < b.name ? -1 : 1))
    .map(({ name, digest }) => ({ name: shortName(name), digest }));
}

/** Whether the server still has a model with the same files. */
export async function isThere({ name, digest }: Embedder, signal: AbortSignal): Promise<boolean> {
  const { models } = await getJson<{ models: ListedModel[] }>("/api/tags", { signal });
  return models.some((model) => shortName(model.name) === name && model.digest === digest);
}

async function isEmbedder({ name, digest }: ListedModel, signal: AbortSignal): Promise<boolean> {
  const before = known.get(digest);
  if (before !== undefined) return before;
  try {
    const { model_info: info } = await getJson<ShownModel>("/api/show", { body: { model: name }, signal });
    const pooling = info[`${info["general.architecture"]}.pooling_type`];
    known.set(digest, typeof pooling === "number" && POOLINGS.includes(pooling));
  } catch (error) {
    if (signal.aborted) throw error;
    return false; // a model that cannot be read makes no vectors
  }
  return known.get(digest) ?? false;
}

interface Reply {
  data: { index: number; embedding: string }[];
}

/** The vectors of texts, of length 1. The model puts the prompt before them that it is made for. */
export async function embed(
  { name }: Embedder,
  texts: readonly string[],
  kind: "document" | "query",
  signal: AbortSignal,
): Promise<Float32Array[]> {
  const body = { model: name, input: texts, input_type: kind, encoding_format: "base64", truncate: true };
  const { data } = await getJson<Reply>("/v1/embeddings", { body, signal });
  return data.map(({ embedding }) => readNumbers(embedding));
}

/** Little-endian numbers of 32 bits in base64. */
export function readNumbers(base64: string): Float32Array {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, at) => view.getFloat32(4 * at, true));
}
