import { Code, FileJson, FileText, FolderInput, Pencil, Pin, PinOff, Trash2 } from "lucide-react";
import { useState } from "react";
import { lazily } from "../lib/lazily";
import { go } from "../lib/route";
import { saveFile } from "../lib/save";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { Field } from "../ui/Field";
import { Menu, MenuItem } from "../ui/Menu";
import { FolderDialog } from "./FolderDialog";
import { fileName } from "./files";
import { arrangeConversations, readWholes, removeConversations, renameConversation } from "./library";
import { exportJson, exportMarkdown } from "./transfer";
import type { Conversation } from "./types";

const CodeDialog = lazily(() => import("./CodeDialog"));

/** What can be done with a whole conversation. */
export function ConversationMenu({ conversation, small = true }: { conversation: Conversation; small?: boolean }) {
  const [asked, setAsked] = useState<"rename" | "folder" | "code" | null>(null);
  const close = () => setAsked(null);
  const { id, pinned = false } = conversation;
  return (
    <>
      <Menu label={`Actions for “${conversation.title}”`} small={small}>
        <MenuItem onSelect={() => setAsked("rename")}>
          <Pencil /> Rename
        </MenuItem>
        <MenuItem onSelect={() => arrangeConversations([id], { pinned: !pinned })}>
          {pinned ? <PinOff /> : <Pin />} {pinned ? "Unpin" : "Pin"}
        </MenuItem>
        <MenuItem onSelect={() => setAsked("folder")}>
          <FolderInput /> Move to a folder
        </MenuItem>
        <MenuItem onSelect={() => setAsked("code")}>
          <Code /> View code
        </MenuItem>
        <MenuItem onSelect={() => void saveAs(conversation, "json")}>
          <FileJson /> Export as JSON
        </MenuItem>
        <MenuItem onSelect={() => void saveAs(conversation, "md")}>
          <FileText /> Export as Markdown
        </MenuItem>
        <MenuItem danger onSelect={() => void remove(conversation.id)}>
          <Trash2 /> Delete
        </MenuItem>
      </Menu>
      <RenameDialog key={asked} open={asked === "rename"} conversation={conversation} onClose={close} />
      <FolderDialog open={asked === "folder"} ids={[conversation.id]} onClose={close} />
      {asked === "code" && <CodeDialog conversation={conversation} onClose={close} />}
    </>
  );
}

async function remove(id: string): Promise<void> {
  await removeConversations([id]);
  if (location.hash.endsWith(id)) go("chat");
}

async function saveAs(conversation: Conversation, ending: "json" | "md"): Promise<void> {
  const [whole] = await readWholes([conversation]);
  if (!whole) return;
  const name = fileName(conversation.title, ending);
  if (ending === "json") saveFile(name, exportJson([whole]), "application/json");
  else saveFile(name, exportMarkdown(whole), "text/markdown");
}

interface DialogProps {
  open: boolean;
  conversation: Conversation;
  onClose: () => void;
}

function RenameDialog({ open, conversation, onClose }: DialogProps) {
  const [title, setTitle] = useState(conversation.title);
  const save = () => {
    renameConversation(conversation.id, title);
    onClose();
  };
  return (
    <Dialog open={open} title="Rename the conversation" onClose={onClose}>
      <DialogForm onSubmit={save}>
        <Field label="Title">
          {(ids) => <input {...ids} value={title} maxLength={200} onChange={(event) => setTitle(event.target.value)} />}
        </Field>
        <Button kind="primary" type="submit" disabled={!title.trim()}>
          Rename
        </Button>
      </DialogForm>
    </Dialog>
  );
}
