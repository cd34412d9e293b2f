import { useServerInfo } from "../api/manage";
import { findSight, useModels } from "../api/models";
import type { Sight } from "./files";
import { countPictures, MOST_PICTURES } from "./pictures";
import type { Conversation, Message } from "./types";

/** What the model of a conversation can be shown. Where that is not known, the server refuses. */
export function useSight({ settings }: Conversation, path: readonly Message[]): Sight {
  const models = useModels().data;
  const usual = useServerInfo().data?.default_model ?? "";
  const name = settings.model || usual;
  const isBlind = settings.asText || findSight(models, name) === false;
  return {
    blind: isBlind ? `${name || "This model"} reads text only. Choose a model that sees, such as Qwen3-VL.` : null,
    room: MOST_PICTURES - countPictures(path),
  };
}
