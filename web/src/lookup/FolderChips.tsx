import { Folder as FolderIcon, FolderSearch, X } from "lucide-react";
import { useEffect, useRef } from "react";
import { formatCount } from "../lib/format";
import { Button, IconButton } from "../ui/Button";
import { Help } from "../ui/Help";
import { Notice } from "../ui/Notice";
import styles from "./FolderChips.module.css";
import { type Attaching, computeVectors, removeFolder } from "./folders";
import { type Found, readChosen } from "./gather";
import type { Folder } from "./storage";
import type { Folders } from "./useFolders";

/** The folders that questions are looked up in, and what happens to them now. */
export function FolderChips({ folders }: { folders: Folders }) {
  const { list, attaching, said, problem, isLooking, dismiss } = folders;
  return (
    <>
      {problem && <Notice kind="error">{problem}</Notice>}
      {said.length > 0 && (
        <Notice
          kind="warning"
          actions={
            <IconButton label="Close the note" small onClick={dismiss}>
              <X />
            </IconButton>
          }
        >
          {said.map((sentence) => (
            <p key={sentence}>{sentence}</p>
          ))}
        </Notice>
      )}
      {list.length > 0 && (
        <ul className={styles.folders} aria-label="Folders of the chat">
          {list.map((folder) => (
            <Chip key={folder.name} folder={folder} isBusy={attaching !== null} />
          ))}
        </ul>
      )}
      {attaching && <Progress {...attaching} />}
      {isLooking && (
        <p className={styles.hint} role="status">
          Looks the question up…
        </p>
      )}
    </>
  );
}

function Chip({ folder, isBusy }: { folder: Folder; isBusy: boolean }) {
  const { name, files, passages, model, reason, left } = folder;
  return (
    <li>
      <FolderIcon aria-hidden="true" />
      <span className={styles.name}>{name}</span>
      <span className={styles.size}>
        {count(files, "file")}, {count(passages, "passage")}, by {model ? "vectors" : "words"}
      </span>
      <Help about={`the lookup in ${name}`}>
        <div className={styles.help}>
          <p>
            {model
              ? `Each question takes along the passages whose vectors are nearest to its own. “${model.name}” makes them.`
              : reason}
          </p>
          {left.map((sentence) => (
            <p key={sentence}>{sentence}</p>
          ))}
          {!isBusy && (
            <Button small onClick={() => void computeVectors(folder)}>
              {model ? "Compute the vectors anew" : "Compute the vectors"}
            </Button>
          )}
        </div>
      </Help>
      <IconButton
        label={`Remove ${name} from the chat`}
        small
        disabled={isBusy}
        onClick={() => void removeFolder(folder)}
      >
        <X />
      </IconButton>
    </li>
  );
}

function Progress({ name, step, done, total, stop }: Attaching) {
  if (step === "waits")
    return (
      <div className={styles.progress}>
        <p role="status">“{name}” waits until another folder is done</p>
        <Button small onClick={stop}>
          Cancel
        </Button>
      </div>
    );
  const what = step === "reads" ? "Files that are read" : "Vectors that are computed";
  return (
    <div className={styles.progress}>
      <p role="status">
        {step === "reads" ? "Reads" : "Computes the vectors of"} “{name}”
      </p>
      {total > 0 && (
        <>
          <progress value={done} max={total} aria-label={what} />
          <span className={styles.size}>
            {formatCount(done)} of {formatCount(total)}
          </span>
        </>
      )}
      <Button small onClick={stop}>
        {step === "reads" ? "Cancel" : "Stop the vectors"}
      </Button>
    </div>
  );
}

/** Chooses a folder, where the browser can. */
export function FolderButton({
  onFolder,
}: {
  onFolder: (name: string, list: () => Promise<readonly Found[]>) => void;
}) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.setAttribute("webkitdirectory", ""), []);
  if (!("webkitdirectory" in HTMLInputElement.prototype)) return null;
  const take = (files: File[]) => {
    const found = readChosen(files);
    const name = found[0]?.path.split("/")[0];
    if (name) onFolder(name, async () => found);
  };
  return (
    <>
      <input
        ref={input}
        type="file"
        hidden
        onChange={(event) => {
          take([...(event.target.files ?? [])]);
          event.target.value = "";
        }}
      />
      <IconButton label="Attach a folder" onClick={() => input.current?.click()}>
        <FolderSearch />
      </IconButton>
    </>
  );
}

function count(number: number, what: string): string {
  return `${formatCount(number)} ${what}${number === 1 ? "" : "s"}`;
}
