import { useMutation, useQueryClient } from "@tanstack/react-query";
import { describeError } from "../api/client";
import { deleteModel, type ListedModel, type ModelFiles, refreshModels, shortName, useModelFiles } from "../api/manage";
import { formatBytes } from "../lib/format";
import { Button } from "../ui/Button";
import { Dialog } from "../ui/Dialog";
import { Notice } from "../ui/Notice";

/** Asks before a model is deleted. */
export function DeleteDialog({ model, onClose }: { model: ListedModel; onClose: () => void }) {
  const queries = useQueryClient();
  const remove = useMutation({
    mutationFn: () => deleteModel(model.name),
    onSuccess: async () => {
      await refreshModels(queries);
      onClose();
    },
  });
  const name = shortName(model.name);
  const files = useModelFiles(model.name).data;
  return (
    <Dialog
      open
      title={`Delete ${name}?`}
      onClose={onClose}
      actions={
        <>
          <Button onClick={onClose}>Keep it</Button>
          <Button kind="danger" onClick={() => remove.mutate()} disabled={remove.isPending}>
            Delete {name}
          </Button>
        </>
      }
    >
      <p>{describeFate(name, model.size, files)}</p>
      {remove.error && <Notice kind="error">{describeError(remove.error)}</Notice>}
    </Dialog>
  );
}

/** What becomes of the files of a model. */
function describeFate(name: string, bytes: number, files: ModelFiles | undefined): string {
  if (!files) return `The name ${name} goes.`;
  if (!files.stays) return `Its file of ${formatBytes(bytes)} is deleted with it. To have it again, pull it again.`;
  if (files.shared_with.length > 0)
    return `Only this name goes: ${files.shared_with.join(", ")} ${files.shared_with.length === 1 ? "has" : "have"} the same file.`;
  return `Only the name goes. The file ${files.path} stays.`;
}
