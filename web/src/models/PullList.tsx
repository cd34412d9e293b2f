import { useQueryClient } from "@tanstack/react-query";
import { X } from "lucide-react";
import { refreshModels } from "../api/manage";
import { startChat } from "../chat/startChat";
import { formatBytes } from "../lib/format";
import { useStore } from "../lib/store";
import { Button, IconButton } from "../ui/Button";
import styles from "./PullList.module.css";
import { dismissPull, editPull, type Pull, pulls, startPull, stopPull, unfinished } from "./pulls";

/** The pulls of this tab, and those that were left unfinished. */
export function PullList() {
  const shown = useStore(pulls);
  const left = useStore(unfinished).filter((name) => !shown.some((pull) => pull.model === name));
  if (shown.length + left.length === 0) return null;
  return (
    <ul className={styles.list} aria-label="Pulls">
      {shown.map((pull) => (
        <PullRow key={pull.model} pull={pull} />
      ))}
      {left.map((model) => (
        <PullRow key={model} pull={{ ...LEFT, model }} />
      ))}
    </ul>
  );
}

const LEFT: Omit<Pull, "model"> = {
  state: "stopped",
  text: "Not finished. What came is kept; resume goes on from there.",
  doneBytes: 0,
  totalBytes: 0,
  bytesPerSecond: 0,
  hasSome: true,
};

function PullRow({ pull }: { pull: Pull }) {
  const queries = useQueryClient();
  const resume = () => void startPull(pull.model, () => void refreshModels(queries));
  return (
    <li className={styles.row}>
      <div className={styles.head}>
        <strong>{pull.model}</strong>
        {pull.state === "running" ? (
          <Button small onClick={() => stopPull(pull.model)}>
            Stop
          </Button>
        ) : (
          <span className={styles.buttons}>
            {pull.state === "done" ? (
              <Button small kind="primary" onClick={() => startChat(pull.model)}>
                Chat with it
              </Button>
            ) : (
              <Button small onClick={resume}>
                {pull.hasSome ? "Resume" : "Try again"}
              </Button>
            )}
            {pull.state === "failed" && !pull.hasSome && (
              <Button small onClick={() => editPull(pull.model)}>
                Edit
              </Button>
            )}
            <IconButton small label="Take it off the list" onClick={() => dismissPull(pull.model)}>
              <X />
            </IconButton>
          </span>
        )}
      </div>
      {pull.totalBytes > 0 && (
        <progress value={pull.doneBytes} max={pull.totalBytes} aria-label={`Progress of ${pull.model}`} />
      )}
      <p className={pull.state === "failed" ? styles.failed : styles.text} role="status">
        {describe(pull)}
      </p>
    </li>
  );
}

function describe(pull: Pull): string {
  if (pull.totalBytes === 0 || pull.state !== "running") return pull.text;
  const speed = pull.bytesPerSecond > 0 ? ` · ${formatBytes(pull.bytesPerSecond)}/s` : "";
  return `${pull.text} · ${formatBytes(pull.doneBytes)} of ${formatBytes(pull.totalBytes)}${speed}`;
}
