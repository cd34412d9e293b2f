import { ArrowUp, Paperclip, Square, TextSearch, X } from "lucide-react";
import { type ClipboardEvent, type KeyboardEvent, useEffect, useRef, useState } from "react";
import { runCommand, useCommand } from "../lib/commands";
import { formatBytes } from "../lib/format";
import { FolderButton, FolderChips } from "../lookup/FolderChips";
import type { Folders } from "../lookup/useFolders";
import { Button, IconButton } from "../ui/Button";
import { Notice } from "../ui/Notice";
import styles from "./Composer.module.css";
import { keepDraft, readDraft } from "./drafts";
import { LengthHint } from "./LengthHint";
import { Pictures } from "./Pictures";
import type { Attached, Attachment, Conversation, Message } from "./types";
import type { useDroppedFiles } from "./useDroppedFiles";
import { useRunOf } from "./useThread";

/** Characters of a text for which there is another way than to send all of it. */
const LONG_TEXT = 8_000;

interface Props {
  conversation: Conversation;
  path: readonly Message[];
  files: ReturnType<typeof useDroppedFiles>;
  folders: Folders;
  /** Whether pictures can be added. */
  sees: boolean;
  /** Answers whether it was sent; where it was not, what is written stays. */
  onSend: (text: string, attached: Attached) => true | Promise<boolean>;
}

/** Whether the keyboard is one on a screen, whose Enter begins a line. */
function isTouch(): boolean {
  return window.matchMedia("(hover: none) and (pointer: coarse)").matches;
}

/** Where the next message is written. Enter sends it, with Shift it begins a line. */
export function Composer({ conversation, path, files, folders, sees, onSend }: Props) {
  const { dropped: attached, refused, takeFiles, remove } = files;
  const place = path.length === 0 ? "new" : conversation.id;
  const [text, setText] = useState(() => readDraft(place));
  const area = useRef<HTMLTextAreaElement>(null);
  const run = useRunOf(path);
  const isBusy = files.isReading || folders.attaching !== null || folders.isLooking;
  const canSend = !run && !isBusy && (text.trim() !== "" || attached.files.length > 0 || attached.pictures.length > 0);
  const stop = run?.stop ?? (folders.isLooking ? folders.stopLooking : undefined);
  const latest = useRef(text);
  const type = (typed: string) => {
    latest.current = typed;
    setText(typed);
  };
  useEffect(() => {
    const timer = setTimeout(() => keepDraft(place, text), 300);
    return () => clearTimeout(timer);
  }, [place, text]);
  useEffect(() => {
    const keep = () => keepDraft(place, latest.current);
    window.addEventListener("pagehide", keep);
    return () => {
      window.removeEventListener("pagehide", keep);
      keep();
    };
  }, [place]);
  useEffect(() => {
    if (!isTouch()) area.current?.focus();
  }, []);
  useCommand("write", () => area.current?.focus());
  const send = async () => {
    if (!canSend) return;
    const sent = onSend(text, attached);
    if (sent !== true && !(await sent)) return;
    type("");
    keepDraft(place, "");
    area.current?.focus();
  };
  const press = (event: KeyboardEvent) => {
    if (event.key === "Escape") stop?.();
    if (event.key === "ArrowUp" && text === "" && runCommand("editLast")) event.preventDefault();
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing || isTouch()) return;
    event.preventDefault();
    void send();
  };
  const paste = (event: ClipboardEvent) => {
    const { files, types } = event.clipboardData;
    // What was copied from a table or a page is text first, and comes as a picture, too.
    if (files.length === 0 || types.includes("text/plain")) return;
    event.preventDefault();
    void takeFiles([...files]);
  };
  const lookUpFile = (index: number) => {
    const file = attached.files[index];
    if (!file) return;
    remove("files", index);
    folders.attach(file.name, async () => [{ path: file.name, file: new File([file.text], file.name) }]);
  };
  return (
    <div className={styles.place}>
      <div className={styles.composer}>
        {refused.map((reason) => (
          <Notice key={reason} kind="error">
            {reason}
          </Notice>
        ))}
        <FolderChips folders={folders} />
        <Pictures pictures={attached.pictures} onRemove={(index) => remove("pictures", index)} />
        <FileChips files={attached.files} onRemove={(index) => remove("files", index)} onLookUp={lookUpFile} />
        <textarea
          ref={area}
          rows={1}
          dir="auto"
          aria-label="Message"
          placeholder="Ask something"
          value={text}
          readOnly={folders.isLooking}
          onChange={(event) => type(event.target.value)}
          onKeyDown={press}
          onPaste={paste}
        />
        <div className={styles.row}>
          <AttachButton
            label={sees ? "Add pictures, PDFs or text files" : "Add PDFs or text files"}
            onFiles={takeFiles}
          />
          <FolderButton onFolder={folders.attach} />
          <LengthHint conversation={conversation} path={path} text={text} attached={attached} sees={sees} />
          {stop ? (
            <Button
              kind="primary"
              className={styles.send ?? ""}
              onClick={stop}
              aria-label={run ? "Stop the answer" : "Stop the lookup"}
            >
              <Square fill="currentColor" />
            </Button>
          ) : (
            <Button
              kind="primary"
              className={styles.send ?? ""}
              onClick={() => void send()}
              disabled={!canSend}
              aria-label="Send"
            >
              <ArrowUp />
            </Button>
          )}
        </div>
      </div>
    </div>
  );
}

function AttachButton({ label, onFiles }: { label: string; onFiles: (files: Iterable<File>) => void }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        multiple
        hidden
        onChange={(event) => {
          onFiles([...(event.target.files ?? [])]);
          event.target.value = "";
        }}
      />
      <IconButton label={label} onClick={() => input.current?.click()}>
        <Paperclip />
      </IconButton>
    </>
  );
}

function describeSize({ text, url }: Attachment): string {
  return url ? `${formatBytes(0.75 * url.length)}, a scan` : formatBytes(new Blob([text]).size);
}

interface ChipsProps {
  files: readonly Attachment[];
  onRemove?: (index: number) => void;
  /** Look questions up in a long text instead of sending all of it. */
  onLookUp?: (index: number) => void;
}

export function FileChips({ files, onRemove, onLookUp }: ChipsProps) {
  if (files.length === 0) return null;
  return (
    <ul className={styles.files} aria-label="Files of the message">
      {files.map((file, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: two files may have the same name.
        <li key={index}>
          <span className={styles.file}>{file.name}</span>
          <span className={styles.size}>{describeSize(file)}</span>
          {onLookUp && file.text.length > LONG_TEXT && (
            <IconButton
              label={`Look up in ${file.name} instead of sending all of it`}
              small
              onClick={() => onLookUp(index)}
            >
              <TextSearch />
            </IconButton>
          )}
          {onRemove && (
            <IconButton label={`Remove ${file.name}`} small onClick={() => onRemove(index)}>
              <X />
            </IconButton>
          )}
        </li>
      ))}
    </ul>
  );
}
