import { useMutation, useQueryClient } from "@tanstack/react-query";
import { Copy, Info, MessageSquare, Trash2 } from "lucide-react";
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
          {family} · {parameter_size} · {quantization_level} · {formatCount(context_length)} tokens of context
        </p>
      </div>
      <span className={styles.size}>{formatBytes(model.size)}</span>
      <span className={loaded ? styles.loaded : styles.resting}>
        {loaded ? `Loaded · ${describeMemory(loaded)}${describeExpiry(loaded.expires_at)}` : "Not loaded"}
      </span>
      <div className={styles.actions}>
        <Button small onClick={() => change.mutate()} disabled={change.isPending} aria-label={`${verb} ${name}`}>
          {change.isPending ? `${verb}ing…` : verb}
        </Button>
        <Menu label={`More for ${name}`}>
          <MenuItem onSelect={() => startChat(name)}>
            <MessageSquare /> Chat with it
          </MenuItem>
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

/** What a loaded model takes: its weights, and what its cache takes now of what it may. */
function describeMemory({ size, weights_bytes, cache_in_use_bytes, cache_max_bytes }: LoadedModel): string {
  const cache = `cache ${formatBytes(cache_in_use_bytes)} of up to ${formatBytes(cache_max_bytes)}`;
  return `${formatBytes(size)}: weights ${formatBytes(weights_bytes)}, ${cache}`;
}

/** When an idle model is unloaded; nothing for one that stays. */
function describeExpiry(expiresAt: string): string {
  const seconds = (Date.parse(expiresAt) - Date.now()) / 1000;
  return seconds > 0 && seconds < 30 * 86_400
    ? ` · unloads in ${formatSeconds(seconds < 60 ? Math.ceil(seconds) : 60 * Math.round(seconds / 60))} if unused`
    : "";
}
