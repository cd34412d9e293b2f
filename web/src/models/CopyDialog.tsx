import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { describeError } from "../api/client";
import { copyModel, isTaken, refreshModels, shortName } from "../api/manage";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { Field } from "../ui/Field";

/** Asks for a second name of a model. The file is not copied: both names share it. */
export function CopyDialog({ name, onClose }: { name: string; onClose: () => void }) {
  const queries = useQueryClient();
  const [target, setTarget] = useState(`${shortName(name)}-copy`);
  const copy = useMutation({
    mutationFn: (replace: boolean) => copyModel(name, target.trim(), replace),
    onSuccess: async () => {
      await refreshModels(queries);
      onClose();
    },
  });
  const type = (text: string) => {
    setTarget(text);
    copy.reset();
  };
  return (
    <Dialog open title={`Copy ${shortName(name)}`} onClose={onClose}>
      <DialogForm onSubmit={() => copy.mutate(false)}>
        <Field
          label="Name of the copy"
          hint="Both names share one file, so the copy needs no space."
          error={describeRefusal(copy.error, target.trim())}
        >
          {(ids) => <input {...ids} value={target} onChange={(event) => type(event.target.value)} spellCheck={false} />}
        </Field>
        <Button kind="primary" type="submit" disabled={!target.trim() || copy.isPending}>
          Copy
        </Button>
        {isTaken(copy.error) && (
          <Button kind="danger" onClick={() => copy.mutate(true)} disabled={copy.isPending}>
            Replace {target.trim()}
          </Button>
        )}
      </DialogForm>
    </Dialog>
  );
}

/** Why a name was refused. Of one that is taken: that the model behind it would go. */
export function describeRefusal(error: unknown, name: string): string | null {
  if (!error) return null;
  return isTaken(error) ? `There is a model ${name}. To replace it deletes it.` : describeError(error);
}
