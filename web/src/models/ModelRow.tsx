import { useMutation, useQueryClient } from "@tanstack/react-query";
import { Copy, Info, Trash2 } from "lucide-react";
import { useState } from "react";
import { describeError } from "../api/client";
import { type ListedModel, type LoadedModel, loadModel, refreshModels, shortName, unloadModel } from "../api/manage";
import { startChat } from "../chat/startChat";
import { formatBytes, formatCount, formatSeconds } from "../lib/format";
import { go, routeHref } from "../lib/route";
import { Button } from "../ui/Button";
import { Menu, MenuItem } from "../ui/Menu";
import { Notice } from "../ui/Notice";
import { CopyDialog } from "./CopyDialog";
import { DeleteDialog } from "./DeleteDialog";
import styles from "./ModelRow.module.css";

/** One model: what it is, whether it is loaded, and what can be done with it. */
export function ModelRow({ model, loaded }: { model: ListedModel; loaded: LoadedModel | undefined }) {
  const queries = useQueryClient();
  const [asked, setAsked] = useState<"copy" | "delete" | null>(null);
  const change = useMutation({
    mutationFn: () => (loaded ? unloadModel(model.name) : loadModel(model.name)),
    onSettled: () => refreshModels(queries),
  });
  const name = shortName(model.name);
  const { family, parameter_size, quantization_level, context_length } = model.details;
  const verb = loaded ? "Unload" : "Load";
  return (
    <li className={styles.row}>
      <div className={styles.what}>
        <a className={styles.name} href={routeHref("models", model.name)}>
          {name}
        </a>
        <p className={styles.facts}>
          {!model.has_chat_template && "base model, no chat · "}
          {family} · {parameter_size} · {quantization_level} · {formatCount(context_length)} tokens of context
        </p>
      </div>
      <span className={styles.size}>{formatBytes(model.size)}</span>
      <div className={styles.state}>
        <span className={loaded ? styles.loaded : styles.resting}>{loaded ? "Loaded" : "Not loaded"}</span>
        {loaded && (
          <>
            <MemoryFigures loaded={loaded} />
            <span className={styles.expiry}>{describeExpiry(loaded.expires_at)}</span>
          </>
        )}
      </div>
      <div className={styles.actions}>
        <Button small onClick={() => startChat(name)} aria-label={`Chat with ${name}`}>
          Chat
        </Button>
        <Button small onClick={() => change.mutate()} disabled={change.isPending} aria-label={`${verb} ${name}`}>
          {change.isPending ? `${verb}ing…` : verb}
        </Button>
        <Menu label={`More for ${name}`}>
          <MenuItem onSelect={() => go("models", model.name)}>
            <Info /> Details
          </MenuItem>
          <MenuItem onSelect={() => setAsked("copy")}>
            <Copy /> Copy
          </MenuItem>
          <MenuItem danger onSelect={() => setAsked("delete")}>
            <Trash2 /> Delete
          </MenuItem>
        </Menu>
      </div>
      {change.error && (
        <div className={styles.error}>
          <Notice kind="error">
            {name} could not be {loaded ? "unloaded" : "loaded"}. {describeError(change.error)}
          </Notice>
        </div>
      )}
      {asked === "copy" && <CopyDialog name={model.name} onClose={() => setAsked(null)} />}
      {asked === "delete" && <DeleteDialog model={model} onClose={() => setAsked(null)} />}
    </li>
  );
}

/** What a loaded model takes: its weights, what its cache takes now, and what that may take at most. */
function MemoryFigures({ loaded }: { loaded: LoadedModel }) {
  const figures = [
    ["Weights", loaded.weights_bytes],
    ["In use", loaded.cache_in_use_bytes],
    ["Reserved", loaded.cache_max_bytes],
  ] as const;
  return (
    <dl className={styles.memory}>
      {figures.map(([term, bytes]) => (
        <div key={term} title={MEANINGS[term]}>
          <dt>{term}</dt>
          <dd>{formatBytes(bytes)}</dd>
        </div>
      ))}
    </dl>
  );
}

const MEANINGS = {
  Weights: "The model itself",
  "In use": "What the cache of conversations takes now",
  Reserved: "What the cache may take at most, as it is used",
} as const;

/** When an idle model is unloaded; nothing for one that stays. */
function describeExpiry(expiresAt: string): string {
  const seconds = (Date.parse(expiresAt) - Date.now()) / 1000;
  return seconds > 0 && seconds < 30 * 86_400
    ? `Unloads in ${formatSeconds(seconds < 60 ? Math.ceil(seconds) : 60 * Math.round(seconds / 60))} if unused`
    : "";
}
