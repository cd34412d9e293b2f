import { ArrowUp, Paperclip, Square, X } from "lucide-react";
import { type ClipboardEvent, type KeyboardEvent, useEffect, useRef, useState } from "react";
import { runCommand, useCommand } from "../lib/commands";
import { formatBytes } from "../lib/format";
import { Button, IconButton } from "../ui/Button";
import { Notice } from "../ui/Notice";
import styles from "./Composer.module.css";
import { keepDraft, readDraft } from "./drafts";
import { LengthHint } from "./LengthHint";
import { Pictures } from "./Pictures";
import type { Attached, Attachment, Conversation, Message } from "./types";
import { useRunOf } from "./useThread";

interface Props {
  conversation: Conversation;
  path: readonly Message[];
  attached: Attached;
  /** Whether there is more to come. */
  isReading: boolean;
  refused: readonly string[];
  /** Whether pictures can be added. */
  sees: boolean;
  onFiles: (files: Iterable<File>) => void;
  onRemove: (kind: keyof Attached, index: number) => void;
  onSend: (text: string, attached: Attached) => void;
}

/** Whether the keyboard is one on a screen, whose Enter begins a line. */
function isTouch(): boolean {
  return window.matchMedia("(hover: none) and (pointer: coarse)").matches;
}

/** Where the next message is written. Enter sends it, with Shift it begins a line. */
export function Composer({ conversation, path, attached, isReading, refused, sees, onFiles, onRemove, onSend }: Props) {
  const place = path.length === 0 ? "new" : conversation.id;
  const [text, setText] = useState(() => readDraft(place));
  const area = useRef<HTMLTextAreaElement>(null);
  const run = useRunOf(path);
  const canSend =
    !run && !isReading && (text.trim() !== "" || attached.files.length > 0 || attached.pictures.length > 0);
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
  const send = () => {
    if (!canSend) return;
    onSend(text, attached);
    type("");
    keepDraft(place, "");
    area.current?.focus();
  };
  const press = (event: KeyboardEvent) => {
    if (event.key === "Escape" && run) run.stop();
    if (event.key === "ArrowUp" && text === "" && runCommand("editLast")) event.preventDefault();
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing || isTouch()) return;
    event.preventDefault();
    send();
  };
  const paste = (event: ClipboardEvent) => {
    const { files, types } = event.clipboardData;
    // What was copied from a table or a page is text first, and comes as a picture, too.
    if (files.length === 0 || types.includes("text/plain")) return;
    event.preventDefault();
    onFiles([...files]);
  };
  return (
    <div className={styles.place}>
      <div className={styles.composer}>
        {refused.map((reason) => (
          <Notice key={reason} kind="error">
            {reason}
          </Notice>
        ))}
        <Pictures pictures={attached.pictures} onRemove={(index) => onRemove("pictures", index)} />
        <FileChips files={attached.files} onRemove={(index) => onRemove("files", index)} />
        <textarea
          ref={area}
          rows={1}
          dir="auto"
          aria-label="Message"
          placeholder="Ask something"
          value={text}
          onChange={(event) => type(event.target.value)}
          onKeyDown={press}
          onPaste={paste}
        />
        <div className={styles.row}>
          <AttachButton
            label={sees ? "Add pictures, PDFs or text files" : "Add PDFs or text files"}
            onFiles={onFiles}
          />
          <LengthHint conversation={conversation} path={path} text={text} attached={attached} sees={sees} />
          {run ? (
            <Button kind="primary" className={styles.send ?? ""} onClick={run.stop} aria-label="Stop the answer">
              <Square fill="currentColor" />
            </Button>
          ) : (
            <Button kind="primary" className={styles.send ?? ""} onClick={send} disabled={!canSend} aria-label="Send">
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

export function FileChips({ files, onRemove }: { files: readonly Attachment[]; onRemove?: (index: number) => void }) {
  if (files.length === 0) return null;
  return (
    <ul className={styles.files} aria-label="Files of the message">
      {files.map((file, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: two files may have the same name.
        <li key={index}>
          <span className={styles.file}>{file.name}</span>
          <span className={styles.size}>{describeSize(file)}</span>
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
